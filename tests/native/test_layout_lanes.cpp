#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

#include "base/digest.h"
#include "layout/kv_view.h"
#include "testing/layout_lanes.h"
#include "transfer/host_copy.h"

using namespace flexkv;

namespace {

struct Random {
  uint64_t state;
  int64_t operator()(int64_t n) {
    return static_cast<int64_t>(digest_mix(++state) % static_cast<uint64_t>(n));
  }
};

// A layer-first pool at any address, and its runs, which have random sizes.
struct Pool {
  std::vector<unsigned char> memory;
  std::vector<Segment> runs;
  int64_t blocks, stripe = 0;

  explicit Pool(Random& random) : blocks(1 + random(4)) {
    const int64_t layers = 1 + random(5), skew = random(20);
    std::vector<int64_t> sizes;
    for (int64_t i = 0; i < layers; ++i)
      sizes.push_back(random(3) ? 16 * (1 + random(40)) : 1 + random(9000));
    int64_t total = skew;
    for (const int64_t size : sizes) total += size * blocks;
    memory.resize(static_cast<size_t>(total));
    for (auto& byte : memory) byte = static_cast<unsigned char>(random(256));
    int64_t at = skew;
    for (int64_t i = 0; i < layers; ++i) {
      const int64_t size = sizes[static_cast<size_t>(i)];
      runs.push_back({reinterpret_cast<uintptr_t>(memory.data()) + static_cast<uintptr_t>(at), size, size,
                      stripe, static_cast<int32_t>(i)});
      at += size * blocks;
      stripe += size;
    }
  }
};

constexpr size_t kGuard = 64;

}  // namespace

TEST_CASE("host copies and the lane-by-lane functor move the same bytes and nothing else") {
  Random random{3};
  for (int round = 0; round < 300; ++round) {
    Pool pool(random);
    const KvView view(pool.runs, pool.blocks, pool.stripe);
    const int64_t block = random(pool.blocks);
    const size_t skew = static_cast<size_t>(random(33));
    std::vector<unsigned char> expected(static_cast<size_t>(pool.stripe));
    for (const Segment& run : view.runs()) {
      const auto* from = reinterpret_cast<const unsigned char*>(run_address(run, block));
      std::copy(from, from + run.run_bytes, expected.begin() + run.page_offset);
    }
    for (const bool lanes : {false, true}) {
      std::vector<unsigned char> page(static_cast<size_t>(pool.stripe) + skew + kGuard, 0xA5);
      const auto before = pool.memory;
      if (lanes) {
        gather_lane_by_lane(view.segments(), block, page.data() + skew);
      } else {
        gather(view, block, reinterpret_cast<std::byte*>(page.data() + skew));
      }
      REQUIRE(std::equal(expected.begin(), expected.end(), page.begin() + static_cast<long>(skew)));
      REQUIRE(
          std::all_of(page.begin(), page.begin() + static_cast<long>(skew), [](int b) { return b == 0xA5; }));
      REQUIRE(std::all_of(page.end() - kGuard, page.end(), [](int b) { return b == 0xA5; }));
      REQUIRE(pool.memory == before);

      auto changed = page;
      for (auto& byte : changed) byte = static_cast<unsigned char>(~byte);
      auto wanted = pool.memory;
      for (const Segment& run : view.runs()) {
        const auto at =
            static_cast<long>(run_address(run, block) - reinterpret_cast<uintptr_t>(pool.memory.data()));
        std::copy_n(changed.begin() + static_cast<long>(skew) + run.page_offset, run.run_bytes,
                    wanted.begin() + at);
      }
      if (lanes) {
        scatter_lane_by_lane(view.segments(), block, changed.data() + skew);
      } else {
        scatter(view, block, reinterpret_cast<const std::byte*>(changed.data() + skew));
      }
      REQUIRE(pool.memory == wanted);
      std::copy(before.begin(), before.end(), pool.memory.begin());
    }
  }
}

TEST_CASE("copy_run moves every size at every alignment exactly") {
  std::vector<unsigned char> from(20000), to(20000);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<unsigned char>(digest_mix(i));
  for (size_t bytes = 0; bytes < 9000; bytes += bytes < 300 ? 1 : 457) {
    for (size_t skew = 0; skew < 40; skew += 3) {
      std::fill(to.begin(), to.end(), 0xEE);
      copy_run(to.data() + 64 + skew, from.data() + (skew * 7) % 64, bytes);
      auto expected = std::vector<unsigned char>(to.size(), 0xEE);
      std::copy_n(from.begin() + static_cast<long>((skew * 7) % 64), bytes,
                  expected.begin() + static_cast<long>(64 + skew));
      REQUIRE(to == expected);
    }
  }
}
