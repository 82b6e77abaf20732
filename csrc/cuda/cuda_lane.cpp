#include "cuda/cuda_lane.h"

#include <pthread.h>

#include <optional>
#include <utility>

#include "cuda/event.h"
#include "cuda/lane_direction.h"

namespace flexkv::cuda {

struct CudaLane::Shared {
  Shared(const std::shared_ptr<Device>& device, CopyKernels kernels, const CopySwitches& switches,
         std::unique_ptr<DigestCrew> the_digests)
      : current(std::in_place, *device),
        digests(std::move(the_digests)),
        copier(std::make_shared<Copier>(device, kernels, switches)),
        to_device(Direction::kToDevice, device, copier, digests),
        to_host(Direction::kToHost, device, copier, digests) {
    current.reset();
  }
  LaneDirection& of(OpKind kind) { return kind == OpKind::kH2D ? to_device : to_host; }

  std::optional<Current> current;  // set while the constructor makes streams and tests the copy paths
  const std::shared_ptr<DigestCrew> digests;
  const std::shared_ptr<Copier> copier;
  LaneDirection to_device, to_host;
};

CudaLane::CudaLane(std::shared_ptr<Device> device, CopyKernels kernels, const CopySwitches& switches,
                   std::unique_ptr<DigestCrew> digests)
    : device_(std::move(device)),
      name_("cuda:" + std::to_string(device_->ordinal())),
      shared_(std::make_shared<Shared>(device_, kernels, switches, std::move(digests))) {}

CudaLane::~CudaLane() { abandon(); }

// Only the threads own `source`, which is the scheduler. If the lane owned it, too, the scheduler and the
// lane would keep each other alive for ever.
void CudaLane::start(std::shared_ptr<WorkSource> source, int32_t lane) {
  // Starts only the threads that do not exist yet, so that the call can be repeated if the system refused to
  // start a thread.
  static constexpr std::pair<OpKind, const char*> kThreads[] = {{OpKind::kH2D, "flexkv-h2d"},
                                                                {OpKind::kD2H, "flexkv-d2h"}};
  while (threads_.size() < std::size(kThreads)) {
    const auto& [kind, name] = kThreads[threads_.size()];
    threads_.emplace_back(
        [shared = shared_, source, lane, one = kind] { shared->of(one).run(*source, lane); });
    pthread_setname_np(threads_.back().native_handle(), name);
  }
}

void CudaLane::wake(OpKind kind) { shared_->of(kind).wake(); }

std::shared_ptr<StreamEvent> CudaLane::record(StreamId stream) { return record_engine(device_, stream); }

std::string CudaLane::make_wait(StreamEvent& event, StreamId stream) {
  const Current here(*device_);
  require_no_capture(*device_, reinterpret_cast<StreamHandle>(stream));
  return event.make_wait(stream);
}

const Copier& CudaLane::copier() const { return *shared_->copier; }

void CudaLane::end_threads() {
  shared_->to_device.end();
  shared_->to_host.end();
}

void CudaLane::join() {
  end_threads();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  shared_->digests->join();
}

void CudaLane::abandon() {
  end_threads();
  for (std::thread& thread : threads_) thread.detach();
  threads_.clear();
  shared_->digests->abandon();
}

}  // namespace flexkv::cuda
