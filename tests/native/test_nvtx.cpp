// Tests NVTX ranges for a profiler: each thread pops every range that it pushes, and no NVTX function is
// called while ranges are off.
#include <doctest/doctest.h>

#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "base/error.h"
#include "base/nvtx.h"
#include "cuda_world.h"

using namespace flexkv;

namespace {

// An NVTX library that records its calls.
struct Calls {
  std::mutex mutex;
  std::set<std::string> names;
  std::map<std::thread::id, int> open;
  int pushes = 0;
  int unopened_pops = 0;
};
Calls calls;

int push(const char* name) {
  const std::lock_guard lock(calls.mutex);
  calls.names.insert(name);
  ++calls.pushes;
  return calls.open[std::this_thread::get_id()]++;
}

int pop() {
  const std::lock_guard lock(calls.mutex);
  int& open = calls.open[std::this_thread::get_id()];
  if (open == 0) {
    ++calls.unopened_pops;
    return -1;
  }
  return --open;
}

const nvtx::Functions kTable{&push, &pop};

void start_anew() {
  calls.names.clear();
  calls.open.clear();
  calls.pushes = calls.unopened_pops = 0;
}

void move_three_blocks() {
  CudaWorld world(CudaShape{}, {.version = 13000}, {.batch = true, .kernel = false});
  for (int32_t block = 0; block < 4; ++block) world.fill(block, block + 1);
  CHECK(world.run(world.op(OpKind::kD2H, {0, 1, 2}, {0, 1, 2})).status == Status::kOk);
  CHECK(world.run(world.op(OpKind::kH2D, {4, 5, 6}, {0, 1, 2})).status == Status::kOk);
}

}  // namespace

TEST_CASE("nvtx: the threads of the CUDA lane name their work, each balanced") {
  start_anew();
  nvtx::functions = &kTable;
  move_three_blocks();
  nvtx::functions = nullptr;
  CHECK(calls.names == std::set<std::string>{"flexkv H2D", "flexkv D2H"});
  CHECK(calls.unopened_pops == 0);
  CHECK(calls.open.size() == 2);
  for (const auto& [thread, open] : calls.open) CHECK(open == 0);
}

TEST_CASE("nvtx: while ranges are off nothing is called") {
  start_anew();
  REQUIRE(nvtx::functions.load() == nullptr);
  move_three_blocks();
  CHECK(calls.pushes == 0);
}

TEST_CASE("nvtx: a range that was begun while they were off ends without a call, and the other way round") {
  start_anew();
  {
    const nvtx::Range before("before");
    nvtx::functions = &kTable;
  }
  CHECK(calls.pushes + calls.unopened_pops == 0);
  {
    const nvtx::Range during("during");
    nvtx::functions = nullptr;
  }
  CHECK(calls.pushes == 1);
  CHECK(calls.open[std::this_thread::get_id()] == 0);
}

TEST_CASE("nvtx: a library that is none is refused, and ranges stay off") {
  CHECK_THROWS_WITH_AS(nvtx::load("/no/such/library.so"), doctest::Contains("/no/such/library.so"),
                       ConfigError);
  CHECK_THROWS_WITH_AS(nvtx::load("libc.so.6"), doctest::Contains("nvtxRangePushA"), ConfigError);
  CHECK(nvtx::functions.load() == nullptr);
}
