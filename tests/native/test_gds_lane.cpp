// Tests a transfer engine with the gds lane. Faults are injected between the lane and its disks.
#include <doctest/doctest.h>

#include <chrono>
#include <thread>

#include "gds_lane_world.h"

using namespace flexkv;

TEST_CASE("a gds lane names the pages whose I/O fails, comes short or is damaged; all others arrive") {
  constexpr int32_t kCount = 9;
  struct Way {
    IoFault fault;
    PageMiss miss;
  };
  for (const auto& [fault, miss] :
       {Way{IoFault::kFail, PageMiss::kIo}, Way{IoFault::kShort, PageMiss::kShort},
        Way{IoFault::kCorrupt, PageMiss::kData}}) {
    CAPTURE(static_cast<int>(fault));
    const int64_t victim = kLaneHeader + 4 * 16384 + 100;
    LaneWorld world({{.fault = fault, .write = false, .offset = victim, .times = 1}});
    REQUIRE(world.codec->image_bytes() == 16384);
    const auto content = world.pool;
    const OpResult written = world.run(OpKind::kGdsWrite, kCount);
    REQUIRE(written.status == Status::kOk);
    world.seal(written, kCount);
    std::fill(world.pool.begin(), world.pool.end(), 0);
    const OpResult read = world.run(OpKind::kGdsRead, kCount);
    CHECK(read.status == Status::kFailed);
    CHECK(read.failed == std::vector<int32_t>{4});
    CHECK(world.lane->counts().misses[static_cast<size_t>(miss)] == 1);
    for (int32_t layer = 0; layer < kLaneLayers; ++layer) {
      for (int32_t block = 0; block < kLaneBlocks; ++block) {
        if (block == 4) continue;
        const size_t at = static_cast<size_t>((layer * kLaneBlocks + block) * kLaneRun);
        const bool came = std::memcmp(world.pool.data() + at, content.data() + at, kLaneRun) == 0;
        CHECK(came == (block < kCount));
      }
    }
    CHECK(world.run(OpKind::kGdsRead, kCount).status == Status::kOk);
  }
}

TEST_CASE("a failed page names its cause: content, source, transport, or not executed") {
  constexpr int32_t kCount = 5, kVictim = 3;
  constexpr int64_t kAt = kLaneHeader + kVictim * 16384 + 100;
  struct Way {
    const char* what;
    FileFaultRule rule;
    FailureCause cause;
  };
  const auto on_victim = [](IoFault fault) {
    return FileFaultRule{.fault = fault, .write = false, .offset = kAt, .times = 1};
  };
  FileFaultRule of_memory = on_victim(IoFault::kFail);
  of_memory.of_memory = true;
  for (const auto& [what, rule, cause] : {Way{"digest", on_victim(IoFault::kCorrupt), FailureCause::kContent},
                                          Way{"EIO", on_victim(IoFault::kFail), FailureCause::kSource},
                                          Way{"short", on_victim(IoFault::kShort), FailureCause::kSource},
                                          Way{"cuFile", of_memory, FailureCause::kTransport}}) {
    CAPTURE(what);
    LaneWorld world({rule});
    world.seal(world.run(OpKind::kGdsWrite, kCount), kCount);
    const OpResult read = world.run(OpKind::kGdsRead, kCount);
    CHECK(read.failed == std::vector<int32_t>{kVictim});
    CHECK(read.causes == std::vector<FailureCause>{cause});
    CHECK(world.run(OpKind::kGdsRead, kCount).causes.empty());
  }
  LaneWorld world({});
  OpResult written = world.run(OpKind::kGdsWrite, kCount);
  std::fill_n(written.digests.begin() + 2 * kLaneLayers, kLaneLayers, 0);  // page 2: as after an incomplete
                                                                           // write
  world.seal(written, kCount);
  world.device->fail_batches(kCount);
  const OpResult torn = world.run(OpKind::kGdsRead, kCount);
  CHECK(torn.causes == std::vector<FailureCause>(torn.failed.size(), FailureCause::kTransport));
  world.device->fail_batches(0);
  CHECK(world.run(OpKind::kGdsRead, kCount).causes == std::vector<FailureCause>{FailureCause::kContent});
  OpSpec other = world.op(OpKind::kGdsRead, 2);
  std::swap(other.places[0], other.places[1]);
  REQUIRE(world.engine->wait(submit_op(*world.engine, other), kGdsGenerousS));
  CHECK(world.engine->poll(1).front().causes == std::vector<FailureCause>(2, FailureCause::kContent));
  // The lane cannot allocate staging. This check needs another lane, because a lane allocates its staging
  // memory once.
  LaneWorld poor({});
  poor.device->fail_allocation(true);
  const OpResult starved = poor.run(OpKind::kGdsRead, kCount);
  CHECK(starved.causes == std::vector<FailureCause>(kCount, FailureCause::kTransport));
  CHECK_MESSAGE(starved.reason.find("CUDA error 2") != std::string::npos, starved.reason);
  poor.device->fail_allocation(false);
  // These pages were never written, so their trailers are not valid.
  CHECK(poor.run(OpKind::kGdsRead, kCount).causes ==
        std::vector<FailureCause>(kCount, FailureCause::kContent));
  LaneWorld unbound({});
  unbound.device->fail_threads(true);
  CHECK(unbound.run(OpKind::kGdsRead, kCount).causes ==
        std::vector<FailureCause>(kCount, FailureCause::kTransport));
}

TEST_CASE("a gds read that is cancelled before its turn counts as not executed") {
  constexpr int32_t kCount = 16;
  LaneWorld world({{.fault = IoFault::kStall, .write = false, .offset = kLaneHeader, .times = 1}});
  world.seal(world.run(OpKind::kGdsWrite, kCount), kCount);
  const int64_t first = world.submit(OpKind::kGdsRead, 1);
  REQUIRE(world.io->wait_stalled(1, kGdsGenerousS));
  const int64_t second = world.submit(OpKind::kGdsRead, kCount);
  CHECK(world.engine->cancel(second) == kCount);
  world.io->release();
  REQUIRE(world.engine->wait(first, kGdsGenerousS));
  REQUIRE(world.engine->wait(second, kGdsGenerousS));
  for (const OpResult& result : world.engine->poll(2)) {
    CHECK(result.causes == std::vector<FailureCause>(result.failed.size(), FailureCause::kNotExecuted));
  }
}

TEST_CASE("ops of one take that name the same blocks or places all move, and the later one's bytes stay") {
  LaneWorld world({});
  const auto both = [&](OpSpec first, OpSpec second) {
    GraphSpec graph;
    graph.ops = {std::move(first), std::move(second)};  // one graph, so the lane takes both at once
    const auto ticket = world.engine->submit(std::move(graph));
    REQUIRE(ticket);
    REQUIRE(world.engine->wait(*ticket, kGdsGenerousS));
    const auto results = world.engine->poll(3);
    REQUIRE(results.size() == 2);
    for (const OpResult& result : results) {
      CAPTURE(result.reason);
      CHECK(result.status == Status::kOk);
    }
  };
  const auto content = world.pool;
  world.seal(world.run(OpKind::kGdsWrite, 4), 4);
  OpSpec other = world.op(OpKind::kGdsRead, 2);
  other.blocks = {3, 0};
  std::fill(world.pool.begin(), world.pool.end(), 0);
  both(world.op(OpKind::kGdsRead, 4), std::move(other));
  const auto run_of = [&](const auto& pool, int32_t block) { return pool.data() + block * kLaneRun; };
  CHECK(std::memcmp(run_of(world.pool, 1), run_of(content, 1), kLaneRun) == 0);
  // Whichever op finishes last, each block holds a complete page of one of the ops.
  for (const auto& [block, place] : {std::pair{0, 1}, std::pair{3, 0}}) {
    const auto* found = run_of(world.pool, block);
    const bool mine = std::memcmp(found, run_of(content, block), kLaneRun) == 0;
    CHECK((mine || std::memcmp(found, run_of(content, place), kLaneRun) == 0));
  }
  // Two writes of the same blocks, first to different places and then to the same places.
  other = world.op(OpKind::kGdsWrite, 2);
  other.places = {9, 8};
  both(world.op(OpKind::kGdsWrite, 2), std::move(other));
  both(world.op(OpKind::kGdsWrite, 2), world.op(OpKind::kGdsWrite, 2));
}

TEST_CASE("what one take has of two fences is finished fence by fence") {
  struct Passed : StreamEvent {
    std::string make_wait(StreamId) override { return {}; }
    bool reached() override { return true; }
  };
  const auto rule = [](IoFault fault, int32_t place) {
    return FileFaultRule{.fault = fault, .write = true, .offset = kLaneHeader + place * 16384, .times = 1};
  };
  FileFaultRule slow = rule(IoFault::kDelay, 0);
  slow.delay_s = 0.5;  // the other two ops arrive during this time
  LaneWorld world({slow, rule(IoFault::kStall, 2)});
  REQUIRE(world.codec->image_bytes() == 16384);
  std::vector<int64_t> tickets;
  for (int32_t place = 0; place < 3; ++place) {
    GraphSpec graph;
    graph.ops.push_back(world.op(OpKind::kGdsWrite, 1));
    graph.ops.back().places = {place};
    if (place == 2) graph.fence = std::make_shared<Passed>();
    tickets.push_back(*world.engine->submit(std::move(graph)));
  }
  REQUIRE(world.io->wait_stalled(1, kGdsGenerousS));
  CHECK(world.engine->wait(tickets[1], kGdsGenerousS));
  CHECK_FALSE(world.engine->wait(tickets[2], 0));
  world.io->release();
  CHECK(world.engine->wait(tickets[2], kGdsGenerousS));
}

TEST_CASE("a gds write that fails reports no digests for its page") {
  LaneWorld world({{.fault = IoFault::kFail, .write = true, .offset = kLaneHeader + 2 * 16384, .times = 1}});
  const OpResult written = world.run(OpKind::kGdsWrite, 4);
  CHECK(written.failed == std::vector<int32_t>{2});
  REQUIRE(written.digests.size() == 4 * kLaneLayers);
  CHECK(written.digests[2 * kLaneLayers] == 0);
  CHECK(written.digests[3 * kLaneLayers] != 0);
  CHECK(world.lane->counts().write_errors == 1);
}

TEST_CASE("a call that hangs takes the gds lane down, keeps its blocks, and the lane comes up when it ends") {
  LaneWorld world({{.fault = IoFault::kStall, .write = false, .offset = kLaneHeader + 16384, .times = 1}},
                  1.0);
  const OpResult written = world.run(OpKind::kGdsWrite, 4);
  world.seal(written, 4);
  const int64_t ticket = world.submit(OpKind::kGdsRead, 4);
  REQUIRE(world.io->wait_stalled(1, kGdsGenerousS));
  const auto state = [&] {
    for (const LaneState& lane : world.engine->lanes()) {
      if (lane.kind == OpKind::kGdsRead) return lane;
    }
    return LaneState{};
  };
  const auto deadline = deadline_in(kGdsGenerousS);
  while (state().up && Clock::now() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  CHECK_FALSE(state().up);
  CHECK(state().stuck.size() == 1);
  CHECK_FALSE(world.engine->wait(ticket, 0.05));
  CHECK(world.engine->poll(1).empty());
  world.io->release();
  REQUIRE(world.engine->wait(ticket, kGdsGenerousS));
  CHECK(world.engine->poll(1).size() == 1);
  while (!state().up && Clock::now() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  // If the machine stalls for a second, the lane may go down once more.
  Status last = Status::kFailed;
  while (last != Status::kOk && Clock::now() < deadline) last = world.run(OpKind::kGdsRead, 4).status;
  CHECK(last == Status::kOk);
}

TEST_CASE("a load by layers waits for whole gds pages at its first layer, and has all of their layers then") {
  constexpr int32_t kCount = 4;
  constexpr int64_t kVictim = kLaneHeader + 2 * 16384 + 100;
  for (const IoFault fault : {IoFault::kStall, IoFault::kCorrupt}) {
    CAPTURE(static_cast<int>(fault));
    LaneWorld world({{.fault = fault, .write = false, .offset = kVictim, .times = 1}});
    const auto content = world.pool;
    world.seal(world.run(OpKind::kGdsWrite, kCount), kCount);
    std::fill(world.pool.begin(), world.pool.end(), 0);
    GraphSpec graph;
    OpSpec& from_host = graph.ops.emplace_back();
    from_host.op_id = world.next_op++;
    from_host.layerwise = true;
    from_host.blocks = {12};
    from_host.slots = {0};
    graph.ops.push_back(world.op(OpKind::kGdsRead, kCount));
    const int64_t of_disk = graph.ops.back().op_id;
    const int64_t ticket = world.engine->submit(std::move(graph)).value();
    if (fault == IoFault::kStall) {
      REQUIRE(world.io->wait_stalled(1, kGdsGenerousS));
      CHECK_FALSE(world.engine->wait_layer(ticket, 0, 0.05).in_time);
      world.io->release();
    }
    for (int32_t layer = 0; layer < kLaneLayers; ++layer) {
      const LayerWait found = world.engine->wait_layer(ticket, layer, kGdsGenerousS);
      REQUIRE(found.in_time);
      if (fault == IoFault::kCorrupt) {  // the lane reports it before any layer
        REQUIRE(found.failed.size() == 1);
        CHECK(found.failed.front() == std::pair(of_disk, std::vector<int32_t>{2}));
        continue;
      }
      CHECK(found.failed.empty());
      // All layers have arrived when the wait for the first layer returns.
      for (int32_t at = 0; at < kLaneLayers * kLaneBlocks; ++at) {
        if (at % kLaneBlocks >= kCount) continue;
        const auto* run = world.pool.data() + at * kLaneRun;
        CHECK(std::memcmp(run, content.data() + at * kLaneRun, kLaneRun) == 0);
      }
    }
    CHECK(world.engine->wait(ticket, kGdsGenerousS));
  }
}
