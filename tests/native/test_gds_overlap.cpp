// Tests that transforms and I/O of different pages overlap, so that a page that waits for its disk does not
// delay other pages.
#include <doctest/doctest.h>

#include <atomic>
#include <thread>

#include "gds_world.h"

using namespace flexkv;

namespace {

// Counts the pages whose I/O and transform have both finished.
class EndedPages : public PageGate {
 public:
  std::string arrived(int32_t, const std::byte*) override { return {}; }
  std::string digested(int32_t, const std::byte*) override { return {}; }
  void ended(int32_t) override { ++count_; }
  // Waits until `count` pages have finished. Returns false at the deadline.
  bool wait(int32_t count, double deadline_s) const {
    const auto deadline = deadline_in(deadline_s);
    while (count_ < count && seconds_until(deadline) > 0) std::this_thread::yield();
    return count_ >= count;
  }

 private:
  std::atomic<int32_t> count_{0};
};

constexpr int32_t kStalled = 2;      // block 2, in image 1 of disk 0: among the first pages that get slots
constexpr double kNeverEndsS = 0.2;  // how long to wait for an event that must not happen

// Whether all other pages finish while the call of one page is stalled. If `serial` is true, the pages move
// one after another, as in a transfer without overlap.
bool others_end(bool is_read, bool serial) {
  GdsWorld world({{.fault = IoFault::kStall,
                   .write = is_read ? false : true,
                   .offset = GdsWorld::kImage,
                   .device = 0,
                   .times = 1}});
  world.fill(7);
  const auto content = world.pool;
  if (is_read) {
    REQUIRE(world.move(false).ok());
    std::memset(world.pool.data(), 0, world.pool.size());
  }
  EndedPages ended;
  std::atomic<bool> good{true};
  std::thread transfer([&] {
    const auto pages = GdsWorld::pages();
    const size_t step = serial ? 1 : pages.size();
    for (size_t at = 0; at < pages.size(); at += step) {
      const auto report = world.manager->transfer(*world.map, std::span(pages).subspan(at, step), is_read,
                                                  nullptr, false, {&ended, nullptr});
      if (!report.ok()) good = false;
    }
  });
  const bool stalled = world.io->wait_stalled(1, kGdsGenerousS);
  const bool overlap = ended.wait(GdsWorld::kBlocks - 1, serial ? kNeverEndsS : kGdsGenerousS);
  world.io->release();
  transfer.join();
  CHECK(stalled);
  CHECK(good);
  CHECK(ended.wait(GdsWorld::kBlocks, 0));
  if (!is_read) {
    std::memset(world.pool.data(), 0, world.pool.size());
    CHECK(world.move(true).ok());
  }
  CHECK(world.pool == content);
  return overlap;
}

}  // namespace

TEST_CASE("gds overlap: all other pages are read and transformed while one page's read stands still") {
  CHECK(others_end(true, false));
  CHECK_FALSE(others_end(true, true));
}

TEST_CASE("gds overlap: all other pages are transformed and written while one page's write stands still") {
  CHECK(others_end(false, false));
  CHECK_FALSE(others_end(false, true));
}
