#include "cuda/copy_trial.h"

#include <cstring>
#include <vector>

#include "base/error.h"
#include "cuda/pinned_memory.h"

namespace flexkv::cuda {
namespace {

// The test copies kTestRuns runs of each of kTestPages pages. Runs have an odd length, and there are gaps
// between them, which the test checks, too. Lengths and distances are in bytes.
constexpr int64_t kTestRunBytes = 1237;
constexpr int64_t kTestRunStep = 1536;
constexpr int32_t kTestRuns = 4;
constexpr int64_t kTestPages = 2;
constexpr int64_t kTestBytes = kTestRuns * kTestPages * kTestRunStep;

std::string move_there_and_back(const std::shared_ptr<Device>& device, const Mover& move) {
  constexpr auto kBytes = static_cast<size_t>(kTestBytes);
  const PinnedMemory host(device, 2 * kBytes);
  const DeviceMemory memory(device, kBytes);
  CopyStream stream(device, false);
  std::byte* sent = host.bytes();
  std::byte* back = sent + kBytes;
  std::vector<std::byte> wanted(kBytes);
  for (size_t i = 0; i < kBytes; ++i) {
    sent[i] = static_cast<std::byte>(i * 131 + (i >> 8));
    const bool in_run = static_cast<int64_t>(i) % kTestRunStep < kTestRunBytes;
    wanted[i] = in_run ? sent[i] : std::byte{};
  }
  std::memset(back, 0, kBytes);
  // The layout in device memory is layer-first: the first runs of all pages, then the second runs of all
  // pages, and so on.
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
  for (const Direction direction : {Direction::kToDevice, Direction::kToHost}) {
    const auto& pages = direction == Direction::kToDevice ? there : home;
    const std::string failure = move(direction, segments, pages, stream);
    // The test waits even after a failure, because some copies may still be in flight, and the memory that
    // they use is written or freed next.
    const Driver& driver = device->driver();
    const std::string ended =
        driver.failure(driver.stream_synchronize(stream.handle()), "cuStreamSynchronize");
    if (!failure.empty() || !ended.empty()) return failure.empty() ? ended : failure;
  }
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

}  // namespace flexkv::cuda
