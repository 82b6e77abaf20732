// Layerwise GDS_READ: the lane reads the layers of pages from disk in ranges, and verifies each range
// separately.
#include <doctest/doctest.h>

#include <string>
#include <utility>
#include <vector>

#include "gds_lane_world.h"
#include "storage/layer_reads.h"

using namespace flexkv;

namespace {

constexpr int32_t kPages = 7;  // more pages than staging slots
// Offset in a page's image of a byte that only the read of the second range (layers 1 to 3) covers.
constexpr int64_t kInSecond = 3 * kLaneRun + 5;

int64_t in_page(int32_t place, int64_t offset) { return kLaneHeader + place * 16384 + offset; }

// A world with pages on disk and a pool of zeros.
struct LayerWorld : LaneWorld {
  explicit LayerWorld(std::vector<FileFaultRule> rules) : LaneWorld(std::move(rules)) {
    REQUIRE(layer_stages(*codec) == std::vector<int32_t>{0, 1});
    REQUIRE(codec->image_bytes() == 16384);
    content = pool;
    seal(run(OpKind::kGdsWrite, kPages), kPages);
    std::fill(pool.begin(), pool.end(), 0);
  }
  OpSpec read(bool layerwise = true) {
    OpSpec spec = op(OpKind::kGdsRead, kPages);
    spec.layerwise = layerwise;
    return spec;
  }
  bool has(int32_t block, int32_t layer) const {
    const auto at = static_cast<size_t>((layer * kLaneBlocks + block) * kLaneRun);
    return std::memcmp(pool.data() + at, content.data() + at, kLaneRun) == 0;
  }
  // Whether the pool has layers [lo, hi) of every page except `without`.
  bool has_layers(int32_t lo, int32_t hi, int32_t without = -1) const {
    for (int32_t block = 0; block < kPages; ++block) {
      for (int32_t layer = lo; layer < hi; ++layer) {
        if (block != without && !has(block, layer)) return false;
      }
    }
    return true;
  }
  OpResult result(int64_t ticket) {
    REQUIRE(engine->wait(ticket, kGdsGenerousS));
    auto results = engine->poll(2);
    REQUIRE(results.size() == 1);
    return std::move(results.front());
  }

  std::vector<unsigned char> content;
};

}  // namespace

TEST_CASE("the first layer of gds pages is there while the last ones are still being read") {
  LayerWorld world({{.fault = IoFault::kStall, .write = false, .offset = in_page(4, kInSecond)}});
  const int64_t ticket = submit_op(*world.engine, world.read());
  REQUIRE(world.io->wait_stalled(1, kGdsGenerousS));
  const LayerWait first = world.engine->wait_layer(ticket, 0, kGdsGenerousS);
  REQUIRE(first.in_time);
  CHECK(first.failed.empty());
  CHECK(world.has_layers(0, 1));
  CHECK_FALSE(world.has(4, 1));  // layer 1 of other pages may be arriving at this time
  CHECK_FALSE(world.engine->wait_layer(ticket, 1, 0.05).in_time);
  world.io->release();
  CHECK(world.result(ticket).status == Status::kOk);
  CHECK(world.has_layers(0, 4));
  CHECK(world.lane->counts().read_pages == kPages);
  CHECK(world.engine->wait_layer(ticket, kLaneLayers - 1, 0).in_time);
}

TEST_CASE("control: without ranges the first layer waits for the last") {
  LayerWorld world({{.fault = IoFault::kStall, .write = false, .offset = in_page(4, kInSecond)}});
  const int64_t ticket = submit_op(*world.engine, world.read(false));
  REQUIRE(world.io->wait_stalled(1, kGdsGenerousS));
  CHECK_FALSE(world.engine->wait_layer(ticket, 0, 0.05).in_time);
  world.io->release();
  CHECK(world.result(ticket).status == Status::kOk);
}

TEST_CASE("a gds page fails at the range whose read fails, comes short or is damaged") {
  struct Way {
    const char* what;
    IoFault fault;
    FailureCause cause;
    PageMiss miss;
  };
  constexpr int64_t kTrailer = 12288;
  struct Place {
    int64_t offset;
    int32_t good_layers;  // number of the page's layers that arrive
  };
  for (const auto& [what, fault, cause, miss] :
       {Way{"EIO", IoFault::kFail, FailureCause::kSource, PageMiss::kIo},
        Way{"short", IoFault::kShort, FailureCause::kSource, PageMiss::kShort},
        Way{"flipped", IoFault::kCorrupt, FailureCause::kContent, PageMiss::kData}}) {
    for (const auto& [offset, good_layers] : {Place{100, 0}, Place{kInSecond, 1}, Place{kTrailer + 8, 0}}) {
      CAPTURE(what);
      CAPTURE(offset);
      if (fault == IoFault::kCorrupt && offset > kTrailer) continue;  // this byte is not page content
      LayerWorld world({{.fault = fault, .write = false, .offset = in_page(3, offset), .times = 1}});
      const OpResult read = world.result(submit_op(*world.engine, world.read()));
      CHECK(read.failed == std::vector<int32_t>{3});
      CHECK(read.causes == std::vector<FailureCause>{cause});
      CHECK(world.lane->counts().misses[static_cast<size_t>(miss)] == 1);
      CHECK(world.has_layers(0, 4, 3));
      for (int32_t layer = 0; layer < good_layers; ++layer) CHECK(world.has(3, layer));
      CHECK_FALSE(world.has(3, kLaneLayers - 1));
      CHECK(world.result(submit_op(*world.engine, world.read())).status == Status::kOk);
      CHECK(world.has_layers(0, 4));
    }
  }
}

TEST_CASE("a gds page that is damaged between its ranges is refused by the trailer of the later one") {
  // The reads of every page's second range stall. So no thread reads the last page's second range before the
  // test has damaged it.
  std::vector<FileFaultRule> stalls;
  for (int32_t place = 0; place < kPages; ++place) {
    stalls.push_back({.fault = IoFault::kStall, .write = false, .offset = in_page(place, kInSecond)});
  }
  LayerWorld world(std::move(stalls));
  const int64_t ticket = submit_op(*world.engine, world.read());
  REQUIRE(world.io->wait_stalled(1, kGdsGenerousS));
  REQUIRE(world.engine->wait_layer(ticket, 0, kGdsGenerousS).in_time);
  std::fstream file(world.folder.file("slab"), std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(in_page(6, world.codec->image().trailer_offset()));
  file.write("FKVPAGE0", 8);  // has the same effect as the start of a write of another page
  file.close();
  world.io->release();
  const OpResult read = world.result(ticket);
  CHECK(read.failed == std::vector<int32_t>{6});
  CHECK(read.causes == std::vector<FailureCause>{FailureCause::kContent});
  CHECK(world.has_layers(0, 4, 6));
}

TEST_CASE("a gds load that is cancelled between its ranges ends, and what moves then is let end") {
  LayerWorld world({{.fault = IoFault::kStall, .write = false, .offset = in_page(0, kInSecond), .times = 1}});
  const int64_t ticket = submit_op(*world.engine, world.read());
  REQUIRE(world.io->wait_stalled(1, kGdsGenerousS));
  REQUIRE(world.engine->wait_layer(ticket, 0, kGdsGenerousS).in_time);
  world.engine->cancel(ticket);
  CHECK_FALSE(world.engine->wait(ticket, 0.05));
  world.io->release();
  const OpResult read = world.result(ticket);
  for (const FailureCause cause : read.causes) CHECK(cause == FailureCause::kNotExecuted);
  for (int32_t block = 0; block < kPages; ++block) {
    const bool failed = std::find(read.failed.begin(), read.failed.end(), block) != read.failed.end();
    CHECK((failed || (world.has(block, 0) && world.has(block, 3))));
  }
  CHECK(world.result(submit_op(*world.engine, world.read())).status == Status::kOk);
}

TEST_CASE("a gds write is never layerwise") {
  LayerWorld world({});
  OpSpec write = world.op(OpKind::kGdsWrite, 1);
  write.layerwise = true;
  CHECK_THROWS_WITH_AS(submit_op(*world.engine, write), doctest::Contains("never layerwise"), ContractError);
}

TEST_CASE("runs of layers that do not follow each other in the stripe come as one range") {
  // K of both layers, then V of both: a run of layer 1 lies between the two runs of layer 0.
  std::vector<unsigned char> pool(4 * 4096);
  std::vector<Segment> runs;
  for (int32_t run = 0; run < 4; ++run) {
    runs.push_back({reinterpret_cast<uintptr_t>(pool.data()) + static_cast<uintptr_t>(run) * 4096, 4096, 4096,
                    run * 4096, run % 2});
  }
  const KvView view(runs, 1, 4 * 4096);
  const StripePlace place{0, 4 * 4096, 4 * 4096, 5 * 4096};
  CHECK_THROWS_AS(PageMap::stripe(view, place, true, {0, 1}), GeometryError);
  CHECK(PageMap::stripe(view, place, true, {0, 2}).runs().size() == 4);
}
