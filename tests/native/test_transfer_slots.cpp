// Tests loads from slots that the reads of another transfer engine are still filling. The copy of a page
// starts when the page's own bytes are in its slot.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include "base/error.h"
#include "transfer_world.h"

using namespace flexkv;

namespace {

constexpr EngineOptions kOptions{.queue_ops = 64, .copy_threads = 2, .op_stuck_s = 0};

struct SlotWorld : TransferWorld {
  // Slot i holds the bytes that a load must copy to block i. All blocks hold zeros.
  explicit SlotWorld(int32_t blocks, std::vector<FaultRule> rules = {})
      : TransferWorld(blocks, kOptions, std::move(rules)) {
    OpSpec store = op(OpKind::kD2H, blocks);
    for (int32_t block = 0; block < blocks; ++block) fill(block, value(block));
    REQUIRE(engine->wait(submit(store), kGenerousS));
    REQUIRE(engine->poll(1).front().status == Status::kOk);
    for (int32_t block = 0; block < blocks; ++block) fill(block, 0);
  }

  static uint8_t value(int32_t block) { return static_cast<uint8_t>(block % 200 + 1); }
  OpSpec op(OpKind kind, int32_t pages, std::vector<int64_t> reads = {}) {
    OpSpec spec;
    spec.op_id = next_op++;
    spec.kind = kind;
    spec.priority = kind == OpKind::kH2D ? Priority::kLoad : Priority::kStore;
    spec.blocks.resize(static_cast<size_t>(pages));
    std::iota(spec.blocks.begin(), spec.blocks.end(), 0);
    spec.slots = spec.blocks;
    spec.reads = std::move(reads);
    return spec;
  }
  int64_t submit(OpSpec spec) {
    GraphSpec graph;
    graph.ops.push_back(std::move(spec));
    const auto ticket = engine->submit(std::move(graph));
    REQUIRE(ticket);
    return *ticket;
  }
  OpSpec layerwise(int32_t pages, std::vector<int64_t> reads) {
    OpSpec spec = op(OpKind::kH2D, pages, std::move(reads));
    spec.layerwise = true;
    return spec;
  }
  void settle(int32_t slot, int64_t read, bool verified) const {
    pool->slot_arrivals().settle(slot, read, verified);
  }
  void advance(int32_t slot, int64_t read, int32_t layers) const {
    pool->slot_arrivals().advance(slot, read, layers);
  }
  bool layer_holds(int32_t block, int32_t layer) const {
    const auto* bytes =
        reinterpret_cast<const uint8_t*>(run_address(view->runs()[static_cast<size_t>(layer)], block));
    return std::all_of(bytes, bytes + kRunBytes, [&](uint8_t byte) { return byte == value(block); });
  }

  int64_t next_op = 1;
};

}  // namespace

TEST_CASE("pages are loaded as their reads end, in whatever order") {
  SlotWorld world(4);
  world.settle(3, 6, true);  // an earlier read has filled this slot
  std::vector<int64_t> tickets;
  for (int32_t page = 0; page < 4; ++page) {
    OpSpec spec = world.op(OpKind::kH2D, 1, {page == 2 ? kNoRead : 7});
    spec.blocks = spec.slots = {page};
    tickets.push_back(world.submit(std::move(spec)));
  }
  const auto ended = [&](size_t page) { return world.engine->wait(tickets[page], kGenerousS); };
  const auto waits = [&](size_t page) { return !world.engine->wait(tickets[page], 0.01); };
  CHECK(ended(2));
  CHECK((waits(0) && waits(1) && waits(3)));
  world.settle(1, 7, true);
  CHECK(ended(1));
  CHECK((waits(0) && waits(3)));
  world.settle(3, 7, true);
  CHECK(ended(3));
  CHECK(waits(0));
  world.settle(0, 7, true);
  CHECK(ended(0));
  for (const OpResult& result : world.engine->poll(4)) CHECK(result.status == Status::kOk);
  for (int32_t block = 0; block < 4; ++block) CHECK(world.holds(block, SlotWorld::value(block)));
}

TEST_CASE("a page whose read failed, or whose slot was filled by a later one, is named and not copied") {
  SlotWorld world(4);
  const int64_t ticket = world.submit(world.op(OpKind::kH2D, 4, {7, 7, 7, 0}));
  world.settle(1, 7, true);
  world.settle(0, 7, false);
  CHECK(!world.engine->wait(ticket, 0.01));
  world.settle(2, 9, true);
  REQUIRE(world.engine->wait(ticket, kGenerousS));
  const OpResult result = world.engine->poll(1).front();
  CHECK(result.status == Status::kFailed);
  CHECK(result.failed == std::vector<int32_t>{0, 2});
  CHECK(result.reason.find("read 7") != std::string::npos);
  CHECK(world.holds(0, 0));
  CHECK(world.holds(1, SlotWorld::value(1)));
  CHECK(world.holds(2, 0));
  CHECK(world.holds(3, SlotWorld::value(3)));
}

TEST_CASE("reads that have ended before the load is submitted are not waited for") {
  SlotWorld world(3);
  for (int32_t slot = 0; slot < 3; ++slot) world.settle(slot, 5, true);
  REQUIRE(world.engine->wait(world.submit(world.op(OpKind::kH2D, 3, {5, 5, 5})), kGenerousS));
  CHECK(world.engine->poll(1).front().status == Status::kOk);
  for (int32_t slot = 0; slot < 3; ++slot) CHECK(world.holds(slot, SlotWorld::value(slot)));
  world.settle(1, 6, false);
  world.settle(0, 6, false);
  world.settle(2, 6, false);
  REQUIRE(world.engine->wait(world.submit(world.op(OpKind::kH2D, 3, {6, 6, 6})), kGenerousS));
  CHECK(world.engine->poll(1).front().status == Status::kSkipped);
}

TEST_CASE("a load that waits for slots can be cancelled, and does not keep the engine from closing") {
  SlotWorld world(4);
  const int64_t cancelled = world.submit(world.op(OpKind::kH2D, 4, {3, 3, 3, 3}));
  const int64_t open = world.submit(world.op(OpKind::kH2D, 4, {4, 4, 4, 4}));
  CHECK(world.engine->cancel(cancelled) == 4);
  REQUIRE(world.engine->wait(cancelled, kGenerousS));
  CHECK(world.engine->poll(1).front().status == Status::kCancelled);
  for (int32_t slot = 0; slot < 4; ++slot) world.settle(slot, 3, true);  // too late: nothing may move
  CHECK(!world.engine->wait(open, 0.02));
  CHECK(world.engine->close(kGenerousS));
  CHECK(world.engine->poll(1).front().status == Status::kCancelled);
  for (int32_t block = 0; block < 4; ++block) CHECK(world.holds(block, 0));
}

TEST_CASE("a layerwise load moves a layer of a page when that has verified, and not before") {
  SlotWorld world(2);
  const int64_t ticket = world.submit(world.layerwise(2, {7, 7}));
  const auto in_place = [&](int32_t layer, double wait_s) {
    return world.engine->wait_layer(ticket, layer, wait_s).in_time;
  };
  world.advance(0, 7, 1);
  CHECK(!in_place(0, 0.01));
  world.advance(1, 7, 3);
  CHECK(in_place(0, kGenerousS));
  CHECK(!in_place(1, 0.01));
  CHECK((world.layer_holds(0, 0) && world.layer_holds(1, 0)));
  CHECK(!world.layer_holds(0, 1));
  world.advance(0, 7, 2);
  CHECK(in_place(1, kGenerousS));
  CHECK(world.layer_holds(0, 1));
  CHECK(!world.layer_holds(0, 2));
  world.settle(1, 7, true);
  CHECK(!in_place(2, 0.01));
  world.settle(0, 7, true);
  REQUIRE(world.engine->wait(ticket, kGenerousS));
  CHECK(world.engine->poll(1).front().status == Status::kOk);
  for (int32_t block = 0; block < 2; ++block) CHECK(world.holds(block, SlotWorld::value(block)));
}

TEST_CASE("a load by pages waits for whole pages, whatever layers of them have verified") {
  SlotWorld world(1);
  const int64_t ticket = world.submit(world.op(OpKind::kH2D, 1, {7}));
  world.advance(0, 7, TransferWorld::kLayers - 1);
  CHECK(!world.engine->wait(ticket, 0.01));
  CHECK(world.holds(0, 0));
  world.settle(0, 7, true);
  REQUIRE(world.engine->wait(ticket, kGenerousS));
  CHECK(world.holds(0, SlotWorld::value(0)));
}

TEST_CASE("a page that is lost after some of its layers were moved is named, and the others arrive") {
  SlotWorld world(3);
  const int64_t ticket = world.submit(world.layerwise(3, {7, 7, 7}));
  for (int32_t slot = 0; slot < 3; ++slot) world.advance(slot, 7, 2);
  CHECK(world.engine->wait_layer(ticket, 1, kGenerousS).in_time);
  world.settle(1, 7, false);
  world.settle(0, 7, true);
  CHECK(!world.engine->wait_layer(ticket, 2, 0.01).in_time);
  world.settle(2, 9, true);  // another read fills slot 2, so read 7 counts as failed for this slot
  const LayerWait last = world.engine->wait_layer(ticket, 3, kGenerousS);
  CHECK(last.in_time);
  REQUIRE(last.failed.size() == 1);
  CHECK(last.failed.front().second == std::vector<int32_t>{1, 2});
  REQUIRE(world.engine->wait(ticket, kGenerousS));
  const OpResult result = world.engine->poll(1).front();
  CHECK(result.status == Status::kFailed);
  CHECK(result.failed == std::vector<int32_t>{1, 2});
  CHECK(world.holds(0, SlotWorld::value(0)));
  CHECK(!world.layer_holds(1, 2));
}

TEST_CASE("a layerwise load can be cancelled between two layers") {
  SlotWorld world(2);
  const int64_t ticket = world.submit(world.layerwise(2, {7, 7}));
  for (int32_t slot = 0; slot < 2; ++slot) world.advance(slot, 7, 1);
  CHECK(world.engine->wait_layer(ticket, 0, kGenerousS).in_time);
  world.engine->cancel(ticket);
  REQUIRE(world.engine->wait(ticket, kGenerousS));
  const OpResult result = world.engine->poll(1).front();
  CHECK(result.status == Status::kFailed);  // kFailed and not kCancelled, because bytes have moved
  CHECK(result.failed == std::vector<int32_t>{0, 1});
  for (int32_t slot = 0; slot < 2; ++slot) world.settle(slot, 7, true);
  CHECK(world.engine->close(kGenerousS));
  CHECK(!world.layer_holds(0, 1));
}

TEST_CASE("what a load waits for is checked at submit") {
  SlotWorld world(2);
  const auto refused = [&](OpSpec spec) {
    GraphSpec graph;
    graph.ops.push_back(std::move(spec));
    CHECK_THROWS_AS(world.engine->submit(std::move(graph)), ContractError);
  };
  refused(world.op(OpKind::kH2D, 2, {1}));
  refused(world.op(OpKind::kH2D, 2, {1, -1}));
  refused(world.op(OpKind::kH2D, 2, {1, kMostReads}));
  refused(world.op(OpKind::kD2H, 2, {1, 1}));
}

TEST_CASE("many loads and many reads at once: every page is there, or named") {
  constexpr int32_t kBlocks = 512;
  constexpr int32_t kLoads = 16;
  constexpr int32_t kEach = kBlocks / kLoads;
  SlotWorld world(kBlocks);
  std::vector<int32_t> order(kBlocks);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(7));
  const auto fails = [](int32_t slot) { return slot % 11 == 0; };
  std::thread reader([&] {
    for (const int32_t slot : order) {
      // As with a real disk, the bytes are written before the slot is settled. Another thread of the engine
      // reads the bytes only after the slot is settled.
      world.pool->slot(slot)[0] = std::byte{SlotWorld::value(slot)};
      world.settle(slot, 100 + slot / kEach, !fails(slot));
    }
  });
  int64_t last = 0;
  for (int32_t load = 0; load < kLoads; ++load) {
    OpSpec spec = world.op(OpKind::kH2D, kEach);
    for (int32_t& block : spec.blocks) block += load * kEach;
    spec.slots = spec.blocks;
    spec.reads.assign(kEach, 100 + load);
    last = world.submit(std::move(spec));
  }
  for (int64_t ticket = 1; ticket <= last; ++ticket) REQUIRE(world.engine->wait(ticket, kGenerousS));
  reader.join();
  const auto results = world.engine->poll(kLoads);
  REQUIRE(results.size() == kLoads);
  for (const OpResult& result : results) {
    const auto load = static_cast<int32_t>(result.op_id) - 2;
    for (int32_t page = 0; page < kEach; ++page) {
      const int32_t block = load * kEach + page;
      const bool named = std::count(result.failed.begin(), result.failed.end(), page) > 0;
      CHECK(named == fails(block));
      CHECK(world.holds(block, named ? 0 : SlotWorld::value(block)));
    }
  }
}

TEST_CASE("many layerwise loads while layers come up: every byte is there, or its page is named") {
  constexpr int32_t kBlocks = 256;
  constexpr int32_t kLoads = 8;
  constexpr int32_t kEach = kBlocks / kLoads;
  constexpr int32_t kLayers = TransferWorld::kLayers;
  SlotWorld world(kBlocks);
  const auto lost_at = [](int32_t slot) { return slot % 7 == 0 ? slot % kLayers : kLayers; };
  for (int32_t slot = 0; slot < kBlocks; ++slot) {
    std::memset(world.pool->slot(slot), 0xEE, TransferWorld::kPageBytes);
  }
  std::vector<int32_t> order(kBlocks);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(11));
  std::thread reader([&] {
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      for (const int32_t slot : order) {
        const int64_t read = 100 + slot / kEach;
        if (layer > lost_at(slot)) continue;
        if (layer == lost_at(slot)) {
          world.settle(slot, read, false);
          continue;
        }
        // As with a real disk, the bytes are written before the slot is reported.
        std::memset(world.pool->slot(slot) + layer * TransferWorld::kRunBytes, SlotWorld::value(slot),
                    TransferWorld::kRunBytes);
        if (layer + 1 < kLayers) {
          world.advance(slot, read, layer + 1);
        } else {
          world.settle(slot, read, true);
        }
      }
    }
  });
  int64_t last = 0;
  for (int32_t load = 0; load < kLoads; ++load) {
    OpSpec spec = world.layerwise(kEach, std::vector<int64_t>(kEach, 100 + load));
    for (int32_t& block : spec.blocks) block += load * kEach;
    spec.slots = spec.blocks;
    last = world.submit(std::move(spec));
  }
  for (int64_t ticket = 1; ticket <= last; ++ticket) REQUIRE(world.engine->wait(ticket, kGenerousS));
  reader.join();
  const auto results = world.engine->poll(kLoads + 1);
  REQUIRE(results.size() == kLoads);
  for (const OpResult& result : results) {
    const auto load = static_cast<int32_t>(result.op_id) - 2;
    for (int32_t page = 0; page < kEach; ++page) {
      const int32_t block = load * kEach + page;
      const bool named = std::count(result.failed.begin(), result.failed.end(), page) > 0;
      CHECK(named == (lost_at(block) < kLayers));
      // No layer of a lost page was moved unless it had been verified.
      for (int32_t layer = lost_at(block); layer < kLayers; ++layer) CHECK(!world.layer_holds(block, layer));
      if (!named) CHECK(world.holds(block, SlotWorld::value(block)));
    }
  }
}
