#include "cuda/cuda_lane.h"

#include <pthread.h>

#include <array>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <utility>

#include "base/error.h"
#include "cuda/event.h"
#include "transfer/run_digests.h"

namespace flexkv::cuda {
namespace {

constexpr size_t kDirections = 2;

Direction direction_of(OpKind kind) {
  return kind == OpKind::kH2D ? Direction::kToDevice : Direction::kToHost;
}

// A piece whose copies were enqueued.
struct Issued {
  std::shared_ptr<Piece> piece;
  std::shared_ptr<Event>
      event;  // null: it could not be recorded, and nothing was enqueued or the stream is broken
  std::vector<MoveResult> results;
};

}  // namespace

struct CudaLane::Shared {
  Shared(std::shared_ptr<Device> the_device, KernelLauncher launcher, const CopySwitches& switches)
      : device(std::move(the_device)),
        current(std::in_place, *device),
        copier(device, launcher, switches),
        streams{std::make_unique<Stream>(device), std::make_unique<Stream>(device)} {
    current.reset();
  }

  // The threads hold the source: kept here, scheduler and lane would hold each other for ever.
  void issue_all(WorkSource& source, int32_t lane);
  void end_all(WorkSource& source, size_t direction);
  void issue(WorkSource& source, const std::shared_ptr<Piece>& piece, int staging);
  std::string enqueue(const Piece& piece, int staging, std::vector<MoveResult>& results);

  const std::shared_ptr<Device> device;
  std::optional<Current> current;  // while the copier makes its self-test
  Copier copier;
  const std::array<std::unique_ptr<Stream>, kDirections> streams;

  std::mutex mutex;
  std::condition_variable to_issue;
  std::array<std::condition_variable, kDirections> to_end;
  std::array<std::deque<Issued>, kDirections> issued;
  std::array<int, kDirections> in_flight{};
  std::array<int, kDirections> next_staging{};
  bool woken = false;
  bool ending = false;
};

// The issuing thread. Never holds `mutex` while it asks the scheduler, which wakes lanes under its own lock.
void CudaLane::Shared::issue_all(WorkSource& source, int32_t lane) {
  const Current here(*device);
  for (;;) {
    {
      std::unique_lock lock(mutex);
      to_issue.wait(lock, [&] { return woken || ending; });
      if (ending) return;
      woken = false;
    }
    for (;;) {
      KindSet allowed = 0;
      {
        const std::lock_guard lock(mutex);
        if (in_flight[0] < kPiecesInFlight) allowed |= kind_bit(OpKind::kH2D);
        if (in_flight[1] < kPiecesInFlight) allowed |= kind_bit(OpKind::kD2H);
      }
      const std::shared_ptr<Piece> piece = allowed != 0 ? source.try_take(lane, allowed) : nullptr;
      if (!piece) break;
      const auto direction = static_cast<size_t>(direction_of(piece->kind()));
      int staging = 0;
      {
        const std::lock_guard lock(mutex);
        ++in_flight[direction];
        // In order, so with kPiecesInFlight under way at most the one whose turn it is has ended.
        staging = next_staging[direction];
        next_staging[direction] = (staging + 1) % Copier::kStagings;
      }
      issue(source, piece, staging);
    }
  }
}

// Enqueues what of the piece may be copied; fills in what may not. Empty, or why nothing or not all was
// enqueued.
std::string CudaLane::Shared::enqueue(const Piece& piece, int staging, std::vector<MoveResult>& results) {
  const Direction direction = direction_of(piece.kind());
  const StreamHandle stream = streams[static_cast<size_t>(direction)]->handle();
  const AttachedView& view = *piece.page(0).view;
  std::vector<PageEnds> pages;
  bool registered = true;
  for (size_t i = 0; i < results.size(); ++i) {
    const PageMove page = piece.page(i);
    if (direction == Direction::kToDevice && view.has_digests()) {
      results[i] = check_digests(view, page.slot, piece.layer_lo(), piece.layer_hi());
      if (results[i].status != Status::kOk) continue;
    }
    pages.push_back({page.block, view.stripe(page.slot)});
    registered = registered && view.pool().registered(page.slot);
  }
  // The engine's stream first: what a store reads must have been written, and what a load overwrites must
  // have been read by the forwards enqueued before.
  if (piece.fence() != nullptr) {
    std::string error = piece.fence()->make_wait(reinterpret_cast<StreamId>(stream));
    if (!error.empty()) return error;
  }
  return copier.enqueue(direction, view.segments(piece.layer_lo(), piece.layer_hi()), pages, registered,
                        staging, stream);
}

void CudaLane::Shared::issue(WorkSource& source, const std::shared_ptr<Piece>& piece, int staging) {
  const auto number = static_cast<size_t>(direction_of(piece->kind()));
  const StreamHandle stream = streams[number]->handle();
  Issued issued_now{piece, nullptr, std::vector<MoveResult>(piece->positions().size())};
  std::string error;
  try {
    error = enqueue(*piece, staging, issued_now.results);
  } catch (const std::exception& failure) {
    error = failure.what();
  }
  try {
    // Also after a failure: what was enqueued before it moves, and the pages stay leased until it has ended.
    issued_now.event = std::make_shared<Event>(device, stream);
  } catch (const std::exception& failure) {
    if (error.empty()) error = failure.what();
    // Without an event the stream itself is waited for; of a context that is broken nothing moves any more.
    device->driver().stream_synchronize(stream);
  }
  if (error.empty()) {
    source.issued(piece, issued_now.event);
  } else {
    for (MoveResult& result : issued_now.results) {
      if (result.status == Status::kOk) result = {Status::kFailed, error};
    }
  }
  const std::lock_guard lock(mutex);
  issued[number].push_back(std::move(issued_now));
  to_end[number].notify_one();
}

// The thread that ends the pieces of one direction, in the order of its stream.
void CudaLane::Shared::end_all(WorkSource& source, size_t direction) {
  const Current here(*device);
  for (;;) {
    Issued next;
    {
      std::unique_lock lock(mutex);
      to_end[direction].wait(lock, [&] { return !issued[direction].empty() || ending; });
      if (issued[direction].empty()) return;
      next = std::move(issued[direction].front());
      issued[direction].pop_front();
    }
    const std::string error = next.event ? next.event->wait() : std::string();
    for (size_t i = 0; i < next.results.size(); ++i) {
      MoveResult& result = next.results[i];
      if (result.status != Status::kOk) continue;
      if (!error.empty()) {
        result = {Status::kFailed, error};
      } else if (direction == static_cast<size_t>(Direction::kToHost)) {
        const PageMove page = next.piece->page(i);
        if (page.view->has_digests()) {
          write_digests_of_stripe(*page.view, page.slot, next.piece->layer_lo(), next.piece->layer_hi());
        }
      }
    }
    {
      const std::lock_guard lock(mutex);
      --in_flight[direction];
      woken = true;
      to_issue.notify_one();
    }
    source.finish(next.piece, next.results);
  }
}

CudaLane::CudaLane(std::shared_ptr<Device> device, KernelLauncher launcher, const CopySwitches& switches)
    : device_(std::move(device)),
      name_("cuda:" + std::to_string(device_->ordinal())),
      shared_(std::make_shared<Shared>(device_, launcher, switches)) {}

CudaLane::~CudaLane() { abandon(); }

void CudaLane::start(std::shared_ptr<WorkSource> source, int32_t lane) {
  const auto run = [&](auto work, const char* name) {
    threads_.emplace_back(work);
    pthread_setname_np(threads_.back().native_handle(), name);
  };
  // One after the other, so that a start which ran out of threads can be tried again.
  if (threads_.empty()) run([shared = shared_, source] { shared->end_all(*source, 0); }, "flexkv-h2d");
  if (threads_.size() == 1) run([shared = shared_, source] { shared->end_all(*source, 1); }, "flexkv-d2h");
  if (threads_.size() == 2)
    run([shared = shared_, source, lane] { shared->issue_all(*source, lane); }, "flexkv-cuda");
}

void CudaLane::wake() {
  const std::lock_guard lock(shared_->mutex);
  shared_->woken = true;
  shared_->to_issue.notify_one();
}

std::shared_ptr<StreamEvent> CudaLane::record(StreamId stream) {
  const Current here(*device_);
  return std::make_shared<Event>(device_, reinterpret_cast<StreamHandle>(stream));
}

void CudaLane::make_wait(StreamEvent& event, StreamId stream) {
  const Current here(*device_);
  if (const std::string error = event.make_wait(stream); !error.empty()) throw CapacityError(error);
}

const Copier& CudaLane::copier() const { return shared_->copier; }

void CudaLane::join() {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->ending = true;
    shared_->to_issue.notify_all();
    for (auto& condition : shared_->to_end) condition.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void CudaLane::abandon() {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->ending = true;
    shared_->to_issue.notify_all();
    for (auto& condition : shared_->to_end) condition.notify_all();
  }
  for (std::thread& thread : threads_) thread.detach();
  threads_.clear();
}

}  // namespace flexkv::cuda
