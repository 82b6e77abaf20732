// Tests a transfer engine with threads that submit, cancel, poll, wait and close at the same time. The test
// runs without a sanitizer, with ASan and UBSan, and with TSan.
#include <doctest/doctest.h>
#include <poll.h>

#include <atomic>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include "base/error.h"
#include "soak.h"
#include "transfer_world.h"

using namespace flexkv;

namespace {

constexpr int kSubmitters = 3;
constexpr int kRing = 4;          // number of graphs that one submitter has in flight
constexpr int32_t kSetPages = 6;  // pages of one graph, which stores them from some blocks and loads them
                                  // into others
constexpr int32_t kStressBlocks = kSubmitters * kRing * 2 * kSetPages;

class Stress {
 public:
  explicit Stress(uint64_t seed)
      : seed_(seed),
        world_(kStressBlocks, {.queue_ops = 16, .copy_threads = 2, .op_stuck_s = 30},
               {{.action = FaultAction::kFail, .kind = OpKind::kD2H, .page = 3, .block = 2 * kSetPages + 3},
                {.action = FaultAction::kFail, .kind = OpKind::kH2D, .page = 1, .layer = 2, .times = 5},
                {.action = FaultAction::kDelay, .page = 2, .delay_s = 0.0005}}) {}

  void run() {
    std::vector<std::thread> threads;
    for (int i = 0; i < kSubmitters; ++i) threads.emplace_back([this, i] { submit(i); });
    threads.emplace_back([this] { poll(); });
    threads.emplace_back([this] { meddle(); });
    while (submitted_ < 150) std::this_thread::yield();
    // The submitters continue while two threads close the engine.
    std::thread other([this] { CHECK(world_.engine->close(kGenerousS)); });
    CHECK(world_.engine->close(kGenerousS));
    other.join();
    closed_ = true;
    for (auto& thread : threads) thread.join();
    collect();
    CHECK(results_.size() == accepted_.size());
    for (const int64_t op_id : accepted_) CHECK_MESSAGE(results_[op_id] == 1, "op ", op_id);
    CHECK(world_.engine->poll(1).empty());
    CHECK(statuses_[Status::kOk] > 0);
    CHECK(statuses_[Status::kFailed] > 0);
  }

 private:
  struct Set {
    std::optional<int64_t> ticket = {};
    uint8_t value = 0;
    bool layerwise = false;
  };

  static std::vector<int32_t> pages_from(int32_t first) {
    std::vector<int32_t> ids;
    for (int32_t i = 0; i < kSetPages; ++i) ids.push_back(first + i);
    return ids;
  }

  // Each page must have arrived with the bytes that were stored, or be reported as failed.
  void check(const Set& set, int32_t first) {
    REQUIRE(world_.engine->wait(*set.ticket, kGenerousS));
    const LayerWait end = world_.engine->wait_layer(*set.ticket, TransferWorld::kLayers - 1, 0);
    CHECK(end.in_time);
    std::vector<bool> failed(kSetPages);
    for (const auto& [op_id, positions] : end.failed) {
      for (const int32_t page : positions) failed[static_cast<size_t>(page)] = true;
    }
    for (int32_t page = 0; page < kSetPages; ++page) {
      if (!failed[static_cast<size_t>(page)]) CHECK(world_.holds(first + kSetPages + page, set.value));
    }
  }

  void submit(int who) {
    std::mt19937_64 random(seed_ * 31 + static_cast<uint64_t>(who));
    std::vector<Set> ring(kRing);
    for (int turn = 0;; ++turn) {
      const int at = turn % kRing;
      Set& set = ring[static_cast<size_t>(at)];
      const int32_t first = (who * kRing + at) * 2 * kSetPages;
      if (set.ticket) check(set, first);
      set = {.value = static_cast<uint8_t>(random()), .layerwise = random() % 2 == 0};
      for (int32_t page = 0; page < kSetPages; ++page) {
        world_.fill(first + page, set.value);
        world_.fill(first + kSetPages + page, static_cast<uint8_t>(~set.value));
      }
      const int64_t store = next_op_.fetch_add(2);
      GraphSpec graph;
      graph.ops.push_back(
          {store, OpKind::kD2H, 0, Priority::kStore, pages_from(first), pages_from(first), false});
      graph.ops.push_back({store + 1, OpKind::kH2D, 0, random() % 2 == 0 ? Priority::kLoad : Priority::kStore,
                           pages_from(first + kSetPages), pages_from(first), set.layerwise});
      graph.edges.push_back({0, 1, random() % 2 == 0 ? EdgeKind::kStream : EdgeKind::kBarrier});
      try {
        while (!(set.ticket = world_.engine->submit(graph))) std::this_thread::yield();  // BUSY
      } catch (const ClosedError&) {
        set.ticket.reset();
        for (int other = 0; other < kRing; ++other) {
          const Set& left = ring[static_cast<size_t>(other)];
          if (left.ticket) check(left, (who * kRing + other) * 2 * kSetPages);
        }
        return;
      }
      ++submitted_;
      last_ticket_ = *set.ticket;
      const std::lock_guard lock(mutex_);
      accepted_.push_back(store);
      accepted_.push_back(store + 1);
    }
  }

  void collect() {
    for (const OpResult& result : world_.engine->poll(3)) {
      const std::lock_guard lock(mutex_);
      ++results_[result.op_id];
      ++statuses_[result.status];
      CHECK((result.status == Status::kOk) == result.failed.empty());
      CHECK((result.status == Status::kOk) == result.reason.empty());
    }
  }

  void poll() {
    while (!closed_) {
      pollfd fd{world_.engine->event_fd(), POLLIN, 0};
      ::poll(&fd, 1, 20);
      collect();
    }
    pollfd fd{world_.engine->event_fd(), POLLIN, 0};
    while (::poll(&fd, 1, 0) == 1) collect();  // the descriptor is readable exactly while results wait
  }

  void meddle() {
    std::mt19937_64 random(seed_);
    while (!closed_) {
      const int64_t ticket = last_ticket_ - static_cast<int64_t>(random() % 3);
      if (ticket < 1) continue;
      if (random() % 4 == 0) world_.engine->cancel(ticket);
      world_.engine->wait(ticket, 0.0002);
      world_.engine->wait_layer(ticket, static_cast<int32_t>(random() % TransferWorld::kLayers), 0.0002);
      CHECK(world_.engine->lanes().size() == 2);
    }
  }

  const uint64_t seed_;
  TransferWorld world_;
  std::atomic<int64_t> next_op_{1};
  std::atomic<int64_t> last_ticket_{0};
  std::atomic<int> submitted_{0};
  std::atomic<bool> closed_{false};
  std::mutex mutex_;
  std::vector<int64_t> accepted_;
  std::map<int64_t, int> results_;
  std::map<Status, int64_t> statuses_;
};

}  // namespace

TEST_CASE("submitting, cancelling, polling, waiting and closing at once: one result an op, no wrong byte") {
  const auto seeds = static_cast<uint64_t>(4 * soak_factor());
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    Stress stress(seed);
    stress.run();
  }
}

TEST_CASE("pools come and go while others attach and wait") {
  for (int round = 0; round < 5 * soak_factor(); ++round) {
    auto pool = HostPool::create({4096, 4096, int64_t{4} << 20}, {.shared = true});
    const PoolAddress address = pool->address();
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] {
        const auto same = HostPool::attach(address);
        same->wait_ready(1000, 0.01);
        same->report();
        if (same->ready_slots() > 0) CHECK_NOTHROW(same->slot(0));
      });
    }
    std::thread closer([&] {
      if (round % 2 == 0) REQUIRE(pool->wait_ready(4096, kGenerousS));
    });
    for (auto& thread : threads) thread.join();
    closer.join();
    pool->close();
    CHECK_THROWS_AS(HostPool::attach(address), ClosedError);
    CHECK_THROWS_AS(pool->slot(0), ClosedError);
  }
}
