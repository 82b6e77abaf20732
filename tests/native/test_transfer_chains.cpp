// Tests chains of as many ops as the queues hold. The engine must not start the next op of a chain by
// recursion, because the stack would overflow.
#include <doctest/doctest.h>

#include "transfer_world.h"

using namespace flexkv;

namespace {

// Number of ops. ThreadSanitizer takes half a minute per 100'000 ops, and its stack frames are larger.
#if defined(__SANITIZE_THREAD__)
constexpr int32_t kChain = 50'000;
#else
constexpr int32_t kChain = 200'000;
#endif

GraphSpec chain(EdgeKind kind, bool with_page) {
  GraphSpec graph;
  for (int32_t i = 0; i < kChain; ++i) {
    OpSpec op;
    op.op_id = i;
    op.kind = OpKind::kD2H;
    op.priority = Priority::kStore;
    if (with_page) op.blocks = op.slots = {0};
    graph.ops.push_back(op);
    if (i > 0) graph.edges.push_back({i - 1, i, kind});
  }
  return graph;
}

const EngineOptions kLongQueues{.queue_ops = kChain, .copy_threads = 1, .op_stuck_s = 0};

}  // namespace

TEST_CASE("a long chain of ops without pages ends") {
  TransferWorld world(1, kLongQueues);
  const auto ticket = world.engine->submit(chain(EdgeKind::kBarrier, false));
  REQUIRE(ticket);
  REQUIRE(world.engine->wait(*ticket, kGenerousS));
  const auto results = world.engine->poll(kChain);
  REQUIRE(results.size() == kChain);
  CHECK(std::all_of(results.begin(), results.end(), [](const auto& r) { return r.status == Status::kOk; }));
}

TEST_CASE("a failure travels along a long chain, and its reason does not grow") {
  for (const EdgeKind kind : {EdgeKind::kBarrier, EdgeKind::kStream}) {
    TransferWorld world(1, kLongQueues,
                        {{.action = FaultAction::kFail, .reason = "disk on fire", .times = 1}});
    const auto ticket = world.engine->submit(chain(kind, true));
    REQUIRE(ticket);
    REQUIRE(world.engine->wait(*ticket, kGenerousS));
    const auto results = world.engine->poll(kChain);
    REQUIRE(results.size() == kChain);
    CHECK(results.front().status == Status::kFailed);
    CHECK(results.back().status == Status::kSkipped);
    CHECK(results.back().reason.size() < 100);
    CHECK(results.back().reason.find("disk on fire") != std::string::npos);
  }
}
