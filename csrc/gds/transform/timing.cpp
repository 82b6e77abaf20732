#include "gds/transform/timing.h"

#include <algorithm>
#include <memory>
#include <string>

#include "base/align.h"
#include "base/error.h"
#include "gds/page_map.h"
#include "transfer/deadline.h"

namespace flexkv {
namespace {

// Owns memory of a device.
class Allocation {
 public:
  Allocation(TransformDevice& device, int64_t bytes) : device_(device), memory_(device.allocate(bytes)) {}
  ~Allocation() { device_.release(memory_); }
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;
  std::byte* at(int64_t offset) const { return static_cast<std::byte*>(memory_) + offset; }

 private:
  TransformDevice& device_;
  void* memory_;
};

// The maximum values of the caller's numbers. Up to these limits, products of the numbers are far from
// overflow. A larger number is a mistake by the caller.
constexpr int64_t kMostBytes = int64_t{1} << 46;
constexpr int32_t kMostLayers = 1 << 16;
constexpr int32_t kMostRepeats = 1 << 20;

int64_t checked(const char* name, int64_t value, int64_t most) {
  if (value >= 1 && value <= most) return value;
  throw ConfigError(std::string(name) + "=" + std::to_string(value) + ": must be in [1, " +
                    std::to_string(most) + "]");
}

void require(const std::string& error) {
  if (!error.empty()) throw TransferError("timing the layout transform: " + error);
}

}  // namespace

std::vector<TransformTime> time_transform(TransformDevice& device, const TimedTransform& what,
                                          int32_t repeats) {
  checked("layers", what.layers, kMostLayers);
  checked("run_bytes", what.run_bytes, kMostBytes / what.layers);
  checked("blocks", what.blocks, kMostBytes / what.layers / what.run_bytes);
  checked("repeats", repeats, kMostRepeats);
  const int64_t stripe = what.layers * what.run_bytes;
  const int64_t total = stripe * what.blocks;
  const Allocation pool(device, total);
  std::vector<Segment> runs;
  for (int32_t layer = 0; layer < what.layers; ++layer) {
    const std::byte* base = pool.at(layer * what.blocks * what.run_bytes);
    runs.push_back(
        {reinterpret_cast<uintptr_t>(base), what.run_bytes, what.run_bytes, layer * what.run_bytes, layer});
  }
  const KvView view(runs, what.blocks, stripe);
  const int64_t trailer = round_up(stripe, kIoAlignBytes);
  const int64_t image = trailer + round_up(int64_t{8} * what.layers, kIoAlignBytes);
  const PageMap map = PageMap::stripe(view, {0, trailer, trailer, image}, true);
  const Allocation slots(device, image * what.blocks);
  std::vector<TransformPage> pages;
  for (int64_t block = 0; block < what.blocks; ++block) {
    pages.push_back({reinterpret_cast<uintptr_t>(slots.at(block * image)), block});
  }
  const auto count = static_cast<int32_t>(pages.size());
  const auto run = [&](Transformer& transformer) {
    const auto start = Clock::now();
    transformer.launch(pages);
    const BatchResult result = transformer.wait();
    require(result.error);
    if (std::any_of(result.bad_run.begin(), result.bad_run.end(), [](int32_t b) { return b != kNoBadRun; })) {
      require("a digest did not match");
    }
    return seconds_since(start);
  };
  run(*device.transformer(map, false, count));  // writes pages and digests into the slots
  const auto transformer = device.transformer(map, what.into_pool, count);
  std::vector<TransformTime> times;
  for (int32_t i = 0; i <= repeats; ++i) {
    TransformTime time;
    time.transform_s = run(*transformer);
    const auto start = Clock::now();
    require(device.copy(slots.at(0), pool.at(0), total));
    time.copy_s = seconds_since(start);
    // The copy has overwritten the digests. If the next round checks digests, they have to be written again.
    if (what.into_pool) run(*device.transformer(map, false, count));
    if (i > 0) times.push_back(time);
  }
  return times;
}

}  // namespace flexkv
