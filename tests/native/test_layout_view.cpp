#include <doctest/doctest.h>

#include "base/error.h"
#include "layout/kv_view.h"
#include "layout/slot_image.h"

using namespace flexkv;

TEST_CASE("a block-first pool coalesces to one segment, a layer-first one does not") {
  std::vector<Segment> block_first, layer_first;
  for (int32_t layer = 0; layer < 4; ++layer) {
    block_first.push_back({4096u + layer * 64u, 4 * 64, 64, layer * 64, layer});
    layer_first.push_back({4096u + layer * 6400u, 64, 64, layer * 64, layer});
  }
  const KvView one(block_first, 100, 256);
  CHECK(one.segments() == std::vector<Segment>{{4096, 256, 256, 0, 0}});
  CHECK(one.runs().size() == 4);
  CHECK(one.segments_of_layers(1, 3) == std::vector<Segment>{{4096 + 64, 256, 128, 64, 1}});
  const KvView many(layer_first, 100, 256);
  CHECK(many.segments().size() == 4);
  CHECK(many.num_layers() == 4);
  CHECK_THROWS_AS(many.segments_of_layers(2, 5), BlockRangeError);
  CHECK_THROWS_AS(many.segments_of_layers(2, 2), BlockRangeError);
}

TEST_CASE("runs that share bytes of the pool or of the page are refused") {
  const Segment a{4096, 100, 64, 0, 0};
  CHECK_NOTHROW(KvView({a, {4096 + 64, 100, 36, 64, 0}}, 10, 100));
  CHECK_THROWS_AS(KvView({a, {4096 + 63, 100, 36, 64, 0}}, 10, 100), GeometryError);   // runs overlap
  CHECK_THROWS_AS(KvView({a, {4096 + 64, 100, 37, 64, 0}}, 10, 101), GeometryError);   // meets next block
  CHECK_THROWS_AS(KvView({a, {4096 + 850, 100, 64, 64, 0}}, 10, 128), GeometryError);  // meets block 8
  CHECK_NOTHROW(KvView({a, {4096 + 964, 100, 64, 64, 0}}, 10, 128));                   // no overlap
  CHECK_THROWS_AS(KvView({{4096, 63, 64, 0, 0}}, 10, 64), GeometryError);              // stride < run
  CHECK_THROWS_AS(KvView({a, {4096 + 70, 200, 20, 64, 0}, {4096 + 350, 300, 20, 84, 0}}, 10, 104),
                  GeometryError);
  CHECK_THROWS_AS(KvView({a, {9000, 100, 64, 63, 0}}, 10, 127), GeometryError);  // runs overlap in the page
  CHECK_THROWS_AS(KvView({a, {9000, 100, 64, 65, 0}}, 10, 129), GeometryError);  // gap in the page
  CHECK_THROWS_AS(KvView({a}, 10, 65), GeometryError);                           // stripe too long
}

TEST_CASE("the overlap proof agrees with a brute-force search") {
  uint64_t seed = 1;
  const auto random = [&](int64_t n) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return static_cast<int64_t>(seed >> 33) % n;
  };
  int refused = 0;
  for (int round = 0; round < 20000; ++round) {
    const int64_t num_blocks = 1 + random(6);
    std::vector<Segment> runs;
    int64_t page = 0;
    for (int64_t i = 1 + random(3); i > 0; --i) {
      runs.push_back({4096u + static_cast<uintptr_t>(random(60)), 1 + random(30), 1 + random(9), page, 0});
      page += runs.back().run_bytes;
    }
    std::vector<int> owners(600);
    for (const Segment& run : runs)
      for (int64_t b = 0; b < num_blocks; ++b)
        for (int64_t i = 0; i < run.run_bytes; ++i)
          ++owners[run_address(run, b) - 4096 + static_cast<uintptr_t>(i)];
    bool shared = false;
    for (const int n : owners) shared |= n > 1;
    refused += shared;
    if (shared) {
      CHECK_THROWS_AS(KvView(runs, num_blocks, page), GeometryError);
    } else {
      CHECK_NOTHROW(KvView(runs, num_blocks, page));
    }
  }
  CHECK(refused > 1000);
  CHECK(refused < 19000);
}

TEST_CASE("sizes that are no sizes are refused") {
  CHECK_THROWS_AS(KvView({}, 10, 0), GeometryError);
  CHECK_THROWS_AS(KvView({{4096, 64, 0, 0, 0}}, 10, 0), GeometryError);
  CHECK_THROWS_AS(KvView({{4096, 0, 64, 0, 0}}, 10, 64), GeometryError);
  CHECK_THROWS_AS(KvView({{4096, -64, 64, 0, 0}}, 10, 64), GeometryError);
  CHECK_THROWS_AS(KvView({{0, 64, 64, 0, 0}}, 10, 64), GeometryError);
  CHECK_THROWS_AS(KvView({{4096, 64, 64, 0, -1}}, 10, 64), GeometryError);
  CHECK_THROWS_AS(KvView({{4096, 64, 64, 0, 0}}, 0, 64), GeometryError);
  CHECK_THROWS_AS(KvView({{4096, 64, 64, 0, 0}}, 10, 64, 10), GeometryError);
  CHECK_THROWS_AS(KvView({{4096, int64_t{1} << 60, 64, 0, 0}}, 1000, 64), GeometryError);
  const KvView view({{4096, 64, 64, 0, 0}}, 10, 64, 1);
  CHECK_THROWS_AS(view.require_block(0), BlockRangeError);
  CHECK_THROWS_AS(view.require_block(10), BlockRangeError);
  CHECK_NOTHROW(view.require_block(9));
}

TEST_CASE("every part of a slot image starts on a 4 KiB boundary") {
  const SlotImage image({1, 4096, 4097}, 100);
  CHECK(image.ranks() == 3);
  CHECK(image.stripe_offset(0) == 0);
  CHECK(image.stripe_offset(1) == 4096);
  CHECK(image.stripe_offset(2) == 8192);
  CHECK(image.trailer_offset() == 16384);
  CHECK(image.total_bytes() == 20480);
  CHECK(SlotImage({4096}).total_bytes() == 4096);
  CHECK_THROWS_AS(SlotImage({}), GeometryError);
  CHECK_THROWS_AS(SlotImage({0}), GeometryError);
  CHECK_THROWS_AS(SlotImage({4096}, -1), GeometryError);
  CHECK_THROWS_AS(image.stripe_offset(3), BlockRangeError);
  CHECK_THROWS_AS(image.stripe_bytes(-1), BlockRangeError);
}
