#include "cuda/copy_trial.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/error.h"
#include "cuda/copy_ways.h"

namespace flexkv::cuda {
namespace {

// Unit: bytes, runs, pages. What is compared: odd sizes at odd distances, more than one of each.
constexpr int64_t kTestRunBytes = 1237;
constexpr int64_t kTestRunStep = 1536;
constexpr int32_t kTestRuns = 4;
constexpr int64_t kTestPages = 2;
constexpr int64_t kTestBytes = kTestRuns * kTestPages * kTestRunStep;
// Tries of what is timed, after a first that is not: another process may use the link meanwhile.
constexpr int kTries = 3;

// Waited for also after a failure: some of it may be under way, in memory that the caller writes or frees.
std::string await_end(const std::shared_ptr<Device>& device, StreamHandle stream,
                      const std::string& failure) {
  std::string ended;
  try {
    ended = Event(device, stream).wait();
  } catch (const std::exception& error) {
    ended = error.what();
    device->driver().stream_synchronize(stream);
  }
  return failure.empty() ? ended : failure;
}

std::string move_there_and_back(const std::shared_ptr<Device>& device, const Mover& move) {
  constexpr auto kBytes = static_cast<size_t>(kTestBytes);
  const PinnedMemory host(device->driver(), 2 * kBytes);
  const DeviceMemory memory(device, kBytes);
  const Stream stream(device);
  std::byte* sent = host.bytes();
  std::byte* back = sent + kBytes;
  std::vector<std::byte> wanted(kBytes);
  for (size_t i = 0; i < kBytes; ++i) {
    sent[i] = static_cast<std::byte>(i * 131 + (i >> 8));
    const bool in_run = static_cast<int64_t>(i) % kTestRunStep < kTestRunBytes;
    wanted[i] = in_run ? sent[i] : std::byte{};
  }
  std::memset(back, 0, kBytes);
  // Layer-first on the device: the rows of all pages of a run, then of the next.
  std::vector<Segment> segments;
  for (int32_t run = 0; run < kTestRuns; ++run) {
    segments.push_back({memory.address() + static_cast<uintptr_t>(run * kTestPages * kTestRunStep),
                        kTestRunStep, kTestRunBytes, run * kTestRunStep, run});
  }
  std::vector<PageEnds> there, home;
  for (int64_t page = 0; page < kTestPages; ++page) {
    there.push_back({page, sent + page * kTestRuns * kTestRunStep});
    home.push_back({page, back + page * kTestRuns * kTestRunStep});
  }
  std::string failure = move(Direction::kToDevice, segments, there, stream.handle());
  failure = await_end(device, stream.handle(), failure);
  if (!failure.empty()) return failure;
  failure = move(Direction::kToHost, segments, home, stream.handle());
  failure = await_end(device, stream.handle(), failure);
  if (!failure.empty()) return failure;
  return std::memcmp(wanted.data(), back, kBytes) == 0 ? std::string() : "other bytes came back";
}

}  // namespace

std::string try_copies(const std::shared_ptr<Device>& device, const Mover& move) {
  try {
    return move_there_and_back(device, move);
  } catch (const CapacityError& error) {
    return error.what();
  }
}

CopyClock::CopyClock(std::shared_ptr<Device> device)
    : device_(std::move(device)),
      on_device_(device_, 2 * kMostMeasuredBytes),
      host_(device_->driver(), kMostMeasuredBytes),
      stream_(device_) {}

// A run is a page of its own, so that all are of one region, as rows are.
double CopyClock::runs_s(Direction direction, int64_t run_bytes, int64_t runs, const Mover& move) {
  const Segment segment{on_device_.address(), 2 * run_bytes, run_bytes, 0, 0};
  std::vector<PageEnds> pages;
  for (int64_t run = 0; run < runs; ++run) pages.push_back({run, host_.bytes() + run * run_bytes});
  double least = 0;
  for (int i = 0; i <= kTries; ++i) {
    const double once = once_s(direction, segment, pages, move);
    if (once <= 0) return 0;
    if (i > 0) least = i == 1 ? once : std::min(least, once);
  }
  return least;
}

double CopyClock::once_s(Direction direction, const Segment& segment, std::span<const PageEnds> pages,
                         const Mover& move) {
  const Driver& driver = device_->driver();
  const StreamHandle stream = stream_.handle();
  // A long copy first: while it moves the calls behind it are made, as those of a piece are while the one
  // before it moves. Then the same once that is not timed: a kernel behind a copy starts later than behind a
  // kernel.
  const bool to_device = direction == Direction::kToDevice;
  const auto address = static_cast<DeviceAddress>(on_device_.address());
  const Code led = to_device ? driver.copy_to_device(address, host_.bytes(), kMostMeasuredBytes, stream)
                             : driver.copy_to_host(host_.bytes(), address, kMostMeasuredBytes, stream);
  std::string failure = driver.failure(led, "copy");
  double seconds = 0;
  try {
    if (failure.empty()) failure = move(direction, std::span(&segment, 1), pages, stream);
    const Event begin(device_, stream, true);
    if (failure.empty()) failure = move(direction, std::span(&segment, 1), pages, stream);
    Event end(device_, stream, true);
    if (const std::string ended = end.wait(); failure.empty()) failure = ended;
    if (failure.empty()) seconds = end.seconds_after(begin);
  } catch (...) {
    await_end(device_, stream, failure);
    throw;
  }
  return failure.empty() ? seconds : 0;
}

}  // namespace flexkv::cuda
