// Tests that several threads compute and check digests of pages with the same result as one thread, whichever
// thread takes which share of the work.
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/align.h"
#include "base/digest.h"
#include "base/error.h"
#include "thread_watch.h"
#include "transfer/digest_crew.h"
#include "transfer/run_digests.h"

using namespace flexkv;

namespace {

constexpr double kLongS = 60;
constexpr int64_t kKiB = 1024;
const char* const kCrewThread = "flexkv-digest";

// The bytes of each run, by layer.
using Shape = std::vector<std::vector<int64_t>>;

// Pages in a host pool, each with different bytes. The view's addresses in the engine's pool are never
// accessed.
struct Pages {
  Pages(const Shape& shape, int32_t slot_count) : shape_(shape) {
    std::vector<Segment> runs;
    for (size_t layer = 0; layer < shape.size(); ++layer) {
      for (const int64_t bytes : shape[layer]) {
        runs.push_back(
            {static_cast<uintptr_t>(kIoAlignBytes + page), 0, bytes, page, static_cast<int32_t>(layer)});
        page += bytes;
      }
    }
    for (Segment& run : runs) run.block_stride = page;
    digest_offset = round_up(page, kIoAlignBytes);
    const int64_t slot_bytes = digest_offset + round_up(static_cast<int64_t>(runs.size()) * 8, kIoAlignBytes);
    pool = HostPool::create({slot_bytes, slot_count, kMaxExtentBytes}, {});
    REQUIRE(pool->wait_ready(slot_count, kLongS));
    view = std::make_unique<AttachedView>(0, std::make_shared<KvView>(runs, 1, page), pool, 0, digest_offset);
    for (int32_t slot = 0; slot < slot_count; ++slot) {
      slots.push_back(slot);
      std::byte* const bytes = view->stripe(slot);  // a call per byte is slow with a sanitizer
      for (int64_t i = 0; i < page; ++i) {
        bytes[i] = static_cast<std::byte>(slot * 37 + i * 7 + (i >> 8) + (i >> 16) * 5);
      }
    }
  }

  int32_t layers() const { return static_cast<int32_t>(shape_.size()); }
  size_t run_count() const { return view->view().runs().size(); }
  const Segment& run(size_t number) const { return view->view().runs()[number]; }

  void write(DigestCrew& crew) { crew.write(*view, slots, 0, layers()); }
  std::vector<MoveResult> check(DigestCrew& crew, int32_t lo, int32_t hi) {
    std::vector<MoveResult> results(slots.size());
    crew.check(*view, slots, lo, hi, results);
    return results;
  }
  std::vector<MoveResult> check(DigestCrew& crew) { return check(crew, 0, layers()); }

  // Whether the digests of layers [lo, hi) are right.
  bool digests_are_right(int32_t lo, int32_t hi) const {
    for (const int32_t slot : slots) {
      for (size_t i = 0; i < run_count(); ++i) {
        if (run(i).layer < lo || run(i).layer >= hi) continue;
        const uint64_t digest =
            run_digest_scalar(view->stripe(slot) + run(i).page_offset, static_cast<size_t>(run(i).run_bytes));
        if (view->digests(slot)[i] != digest) return false;
      }
    }
    return true;
  }
  bool digests_are_right() const { return digests_are_right(0, layers()); }

  // Whether `results` has for every page the same result that one thread computes.
  bool same_as_alone(const std::vector<MoveResult>& results, int32_t lo, int32_t hi) const {
    for (size_t i = 0; i < slots.size(); ++i) {
      const MoveResult alone = check_digests(*view, slots[i], lo, hi);
      if (results[i].status != alone.status || results[i].reason != alone.reason ||
          results[i].cause != alone.cause) {
        return false;
      }
    }
    return true;
  }
  bool same_as_alone(const std::vector<MoveResult>& results) const {
    return same_as_alone(results, 0, layers());
  }

  const Shape shape_;
  int64_t page = 0;
  int64_t digest_offset = 0;
  std::shared_ptr<HostPool> pool;
  std::unique_ptr<AttachedView> view;
  std::vector<int32_t> slots;
};

Shape same_runs(int32_t layers, int64_t bytes) {
  return Shape(static_cast<size_t>(layers), std::vector<int64_t>{bytes});
}

bool all_ok(const std::vector<MoveResult>& results) {
  for (const MoveResult& result : results) {
    if (result.status != Status::kOk) return false;
  }
  return true;
}

// Pages with short and long runs, several per layer. The crew divides these runs into shares in different
// ways.
const Shape kMixed = {{5, 300 * kKiB, 4097},       {700 * kKiB + 13},       {1, 512 * kKiB, 512 * kKiB - 1},
                      {100'003, 100'003, 100'003}, {2048 * kKiB + 4096, 7}, {9}};

struct Case {
  Shape shape;
  int32_t slots;
};

const std::vector<Case> kCases = {
    {same_runs(1, 8192 * kKiB), 1},         // one long run
    {same_runs(1, 8192 * kKiB + 4099), 1},  // one long run of odd length
    {same_runs(1, 512 * kKiB), 1},          // the smallest work that is divided among threads
    {same_runs(1, 512 * kKiB - 1), 1},      // one byte less: the caller works alone
    {same_runs(1, 512 * kKiB - 1), 3},      // no run is cut
    {same_runs(7, 100'003), 2},             // runs that fill a share unevenly
    {same_runs(3, 1), 300},                 // hardly any bytes
    {same_runs(1, 1), 1},
    {same_runs(900, 1000), 2},  // many short runs
    {same_runs(2, 2049), 400},  // small pages, several of which make up a share
    {kMixed, 3},
};

}  // namespace

TEST_CASE("digest crew: any number of threads makes the digests that one makes, and finds them right") {
  for (const Case& one : kCases) {
    Pages pages(one.shape, one.slots);
    CAPTURE(pages.page);
    CAPTURE(one.slots);
    for (const int32_t threads : {1, 2, 5, 16}) {
      CAPTURE(threads);
      DigestCrew crew(threads);
      for (const int32_t slot : pages.slots) {
        std::fill_n(pages.view->digests(slot), pages.run_count(), uint64_t{0});
      }
      CHECK_FALSE(all_ok(pages.check(crew)));  // control: there are no digests yet
      pages.write(crew);
      CHECK(pages.digests_are_right());
      CHECK(all_ok(pages.check(crew)));
    }
  }
}

TEST_CASE("digest crew: only the layers that are asked for are made and checked") {
  Pages pages(kMixed, 4);
  for (const int32_t threads : {1, 5}) {
    DigestCrew crew(threads);
    for (int32_t lo = 0; lo < pages.layers(); ++lo) {
      for (int32_t hi = lo + 1; hi <= pages.layers(); ++hi) {
        for (const int32_t slot : pages.slots) {
          std::fill_n(pages.view->digests(slot), pages.run_count(), uint64_t{1});
        }
        crew.write(*pages.view, pages.slots, lo, hi);
        CHECK(pages.digests_are_right(lo, hi));
        for (size_t i = 0; i < pages.run_count(); ++i) {
          const bool outside = pages.run(i).layer < lo || pages.run(i).layer >= hi;
          if (outside) CHECK(pages.view->digests(2)[i] == 1);
        }
        CHECK(all_ok(pages.check(crew, lo, hi)));
        CHECK((lo == 0 && hi == pages.layers()) == all_ok(pages.check(crew)));
      }
    }
  }
}

TEST_CASE("digest crew: a changed byte is found wherever it is, and its run is named") {
  Pages pages({{1, 130}, {257}, {64, 300}, {9}}, 800);
  REQUIRE(pages.page * 800 > 2 * kDigestShareBytes);
  DigestCrew crew(3);
  pages.write(crew);
  for (int64_t at = 0; at < pages.page; ++at) {
    const auto slot = static_cast<int32_t>(at * 7 % 800);
    pages.view->stripe(slot)[at] ^= std::byte{16};
    const std::vector<MoveResult> results = pages.check(crew);
    size_t run = 0;
    while (at >= pages.run(run).page_offset + pages.run(run).run_bytes) ++run;
    for (int32_t other = 0; other < 800; ++other) {
      const MoveResult& result = results[static_cast<size_t>(other)];
      if (other != slot) {
        REQUIRE(result.status == Status::kOk);
        continue;
      }
      REQUIRE(result.status == Status::kFailed);
      REQUIRE(result.cause == FailureCause::kContent);
      REQUIRE(result.reason == "digest mismatch in run " + std::to_string(run) + " (layer " +
                                   std::to_string(pages.run(run).layer) + ") of slot " +
                                   std::to_string(slot));
    }
    pages.view->stripe(slot)[at] ^= std::byte{16};
  }
  CHECK(all_ok(pages.check(crew)));
}

TEST_CASE("digest crew: of several changed runs the first is named, also of long ones in parts") {
  Pages pages(kMixed, 3);
  for (const int32_t threads : {2, 5, 16}) {
    DigestCrew crew(threads);
    pages.write(crew);
    for (size_t run = 0; run < pages.run_count(); ++run) {
      const int64_t bytes = pages.run(run).run_bytes;
      for (const int64_t in_run : {int64_t{0}, bytes / 2, bytes - 1}) {
        // Changes also all later runs of the page, and the last byte of another page.
        std::vector<std::byte*> changed = {pages.view->stripe(1) + pages.run(run).page_offset + in_run};
        for (size_t later = run + 1; later < pages.run_count(); ++later) {
          changed.push_back(pages.view->stripe(1) + pages.run(later).page_offset);
        }
        changed.push_back(pages.view->stripe(2) + pages.page - 1);
        for (std::byte* byte : changed) *byte ^= std::byte{1};
        const std::vector<MoveResult> results = pages.check(crew);
        CHECK(results[0].status == Status::kOk);
        CHECK(results[1].reason.find("in run " + std::to_string(run) + " (") != std::string::npos);
        CHECK(results[2].reason.find("in run " + std::to_string(pages.run_count() - 1) + " (") !=
              std::string::npos);
        CHECK(pages.same_as_alone(results));
        for (std::byte* byte : changed) *byte ^= std::byte{1};
      }
    }
  }
}

TEST_CASE("digest crew: all of its threads take shares, and with one there is none") {
  Pages pages(same_runs(1, 8192 * kKiB), 1);
  for (const int32_t threads : {1, 2, 5, 16}) {
    CAPTURE(threads);
    Meeting meeting(static_cast<size_t>(threads));
    DigestCrew crew(threads, [&](DigestWork) { meeting.come(); });
    CHECK(threads_named(kCrewThread) == 0);  // the crew starts no threads before it has work
    pages.write(crew);
    CHECK(threads_named(kCrewThread) == threads - 1);
    // A caller that works alone takes no shares, so it does not come to the meeting.
    CHECK(meeting.came() == (threads == 1 ? 0 : static_cast<size_t>(threads)));
    CHECK(meeting.was_there(std::this_thread::get_id()) == (threads > 1));
    CHECK(pages.digests_are_right());
    CHECK(all_ok(pages.check(crew)));
    CHECK(threads_named(kCrewThread) == threads - 1);
    crew.join();
    CHECK(come_to(0, kCrewThread));
  }
}

TEST_CASE("digest crew: little work starts no thread") {
  Pages pages(same_runs(1, 512 * kKiB - 1), 1);
  DigestCrew crew(16);
  pages.write(crew);
  CHECK(all_ok(pages.check(crew)));
  CHECK(threads_named(kCrewThread) == 0);
}

TEST_CASE("digest crew: threads that cannot be started are missed by nobody, and started later") {
  Pages pages(kMixed, 3);
  Meeting alone(1);
  DigestCrew crew(4, [&](DigestWork) { alone.come(); });
  {
    const NoMoreThreads none;
    REQUIRE(NoMoreThreads::refuses());
    pages.write(crew);
    CHECK(pages.digests_are_right());
    pages.view->stripe(1)[pages.run(3).page_offset + 700'000] ^= std::byte{4};
    CHECK(pages.same_as_alone(pages.check(crew)));
    CHECK(threads_named(kCrewThread) == 0);
    CHECK(alone.came() == 1);
  }
  REQUIRE_FALSE(NoMoreThreads::refuses());
  CHECK(pages.same_as_alone(pages.check(crew)));
  CHECK(threads_named(kCrewThread) == 3);
}

TEST_CASE("digest crew: one that makes and one that checks share it") {
  Pages made(same_runs(1, 8192 * kKiB), 1);
  Pages checked(kMixed, 3);
  DigestCrew before(1);
  checked.write(before);
  Meeting meeting(3);  // both callers and the one thread of the crew
  DigestCrew crew(2, [&](DigestWork) { meeting.come(); });
  std::vector<MoveResult> results;
  std::thread other([&] { results = checked.check(crew); });
  made.write(crew);
  other.join();
  CHECK(meeting.came() == 3);
  CHECK(made.digests_are_right());
  CHECK(all_ok(results));
}

namespace {

// Stops each thread of the crew when it takes a share of work, until the test calls let_go() or open().
class Turnstile {
 public:
  void pass(DigestWork work) {
    std::unique_lock lock(mutex_);
    Held& held = held_[std::this_thread::get_id()];
    held.work = work;
    const int mine = ++held.come;
    changed_.notify_all();
    changed_.wait_for(lock, std::chrono::duration<double>(kLongS),
                      [&] { return open_ || held.let_go >= mine; });
  }
  void let_go(std::thread::id id) {
    const std::lock_guard lock(mutex_);
    ++held_[id].let_go;
    changed_.notify_all();
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  // Waits until a thread that is not in `known` has taken a share, and returns the thread.
  std::thread::id await_stranger(const std::vector<std::thread::id>& known) {
    std::unique_lock lock(mutex_);
    std::thread::id found;
    changed_.wait_for(lock, std::chrono::duration<double>(kLongS), [&] {
      for (const auto& [id, held] : held_) {
        if (std::find(known.begin(), known.end(), id) == known.end()) found = id;
      }
      return found != std::thread::id();
    });
    return found;
  }
  // Waits until thread `id` has taken at least `share` shares. Returns the kind of work of the latest one.
  DigestWork await(std::thread::id id, int share) {
    std::unique_lock lock(mutex_);
    REQUIRE(changed_.wait_for(lock, std::chrono::duration<double>(kLongS),
                              [&] { return held_[id].come >= share; }));
    return held_[id].work;
  }

 private:
  struct Held {
    int come = 0;
    int let_go = 0;
    DigestWork work = DigestWork::kCheck;
  };
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::thread::id, Held> held_;
  bool open_ = false;
};

}  // namespace

TEST_CASE("digest crew: a check goes before shares of a write, and a third caller works alone") {
  Pages made(same_runs(1, 8192 * kKiB), 1);
  Pages checked(kMixed, 3);
  Pages third(kMixed, 2);
  DigestCrew before(1);
  checked.write(before);
  Turnstile turnstile;
  DigestCrew crew(2, [&](DigestWork work) { turnstile.pass(work); });
  std::thread writer([&] { made.write(crew); });
  const std::thread::id writing = writer.get_id();
  turnstile.await(writing, 1);
  const std::thread::id helper = turnstile.await_stranger({writing});
  CHECK(turnstile.await(helper, 1) == DigestWork::kWrite);
  third.write(crew);  // the turnstile would stop this call if it took a share
  CHECK(third.digests_are_right());
  std::vector<MoveResult> results;
  std::thread checker([&] { results = checked.check(crew); });
  turnstile.await(checker.get_id(), 1);
  turnstile.let_go(helper);
  CHECK(turnstile.await(helper, 2) == DigestWork::kCheck);
  turnstile.open();
  writer.join();
  checker.join();
  CHECK(made.digests_are_right());
  CHECK(all_ok(results));
}

TEST_CASE("digest crew: abandoned amid the work its threads end, and the caller does the rest") {
  Pages made(same_runs(1, 8192 * kKiB), 1);
  Turnstile turnstile;
  auto crew = std::make_unique<DigestCrew>(3, [&](DigestWork work) { turnstile.pass(work); });
  std::thread writer([&] { made.write(*crew); });
  const std::thread::id writing = writer.get_id();
  turnstile.await(writing, 1);
  turnstile.await(turnstile.await_stranger({writing}), 1);
  crew->abandon();
  turnstile.open();
  writer.join();
  CHECK(made.digests_are_right());
  CHECK(come_to(0, kCrewThread));
  CHECK(all_ok(made.check(*crew)));  // the caller works alone
  CHECK(threads_named(kCrewThread) == 0);
  crew->abandon();
  crew->join();
}

TEST_CASE("digest crew: joined it starts no thread any more") {
  Pages pages(kMixed, 2);
  DigestCrew crew(4);
  pages.write(crew);
  CHECK(threads_named(kCrewThread) == 3);
  crew.join();
  CHECK(come_to(0, kCrewThread));
  CHECK(all_ok(pages.check(crew)));
  CHECK(threads_named(kCrewThread) == 0);
}

TEST_CASE("digest crew: a number of threads that is not allowed is refused by name") {
  for (const int32_t threads : {-1, 0, 17}) {
    const std::string words = "digest_threads=" + std::to_string(threads) + ": must be in [1, 16]";
    CHECK_THROWS_WITH_AS(DigestCrew{threads}, words.c_str(), ConfigError);
  }
}
