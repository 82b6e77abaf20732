// Ways and pieces by what copies take: on a fake driver whose streams have a clock that a test sets. Nothing
// here says how fast a GPU is.
#include <doctest/doctest.h>

#include <algorithm>
#include <thread>

#include "cuda/copy_ways.h"
#include "cuda_world.h"

using namespace flexkv;
using namespace flexkv::cuda;

namespace {

constexpr Capabilities kEverything{true, true, 1 << 20};

// Unit: seconds. So much a piece, so much a copy, and a link.
struct Machine {
  double piece_s = 0, copy_s = 0, bytes_per_s = 50e9;
  double of(int64_t copies, int64_t bytes) const {
    return piece_s + copy_s * static_cast<double>(copies) + static_cast<double>(bytes) / bytes_per_s;
  }
};

struct Machines {
  Machine kernel, batch, rows;
  Machine single = {0, 2e-6, 55e9};
  double of(Path path, int64_t copies, int64_t bytes) const {
    const Machine& machine = path == Path::kKernel    ? kernel
                             : path == Path::kBatch   ? batch
                             : path == Path::kPitched ? rows
                                                      : single;
    return machine.of(copies, bytes);
  }
  TimeRuns time() const {
    return [this](Path path, int64_t run_bytes, int64_t runs) { return of(path, runs, runs * run_bytes); };
  }
};

// How much longer than by the faster of kernel and `other` the worst choice takes, of all lengths and numbers
// of runs that a piece may have.
double worst(const Machines& machines, const Ways& ways, Path other = Path::kBatch) {
  double most = 1;
  for (size_t place = 0; place < kRunLengths.size(); ++place) {
    for (int64_t runs = 1; runs * kRunLengths[place] <= kSubBatchBytes; runs += 1 + runs / 8) {
      const int64_t bytes = runs * kRunLengths[place];
      const double kernel = machines.of(Path::kKernel, runs, bytes);
      const double engine = machines.of(other, runs, bytes);
      const double taken = runs >= ways.kernel_from[place] ? kernel : engine;
      most = std::max(most, taken / std::min(kernel, engine));
    }
  }
  return most;
}

constexpr CopySwitches kMeasured{.batch = true, .kernel = true, .measure = true};

fake_cuda::Settings settings_of(const Machines& machines) {
  fake_cuda::Settings settings;
  settings.seconds = [machines](Path path, int64_t copies, int64_t bytes) {
    return machines.of(path, path == Path::kKernel ? 0 : copies, bytes);
  };
  return settings;
}

const Machines kFastKernel{
    .kernel = {5e-6, 0, 50e9}, .batch = {2e-6, 3e-6, 55e9}, .rows = {2e-6, 4e-6, 55e9}};
const Machines kFastBatches{
    .kernel = {5e-6, 0, 10e9}, .batch = {2e-6, 1e-8, 55e9}, .rows = {2e-6, 1e-7, 55e9}};
const Machines kFastRows{.kernel = {5e-6, 0, 2e9}, .batch = {2e-6, 2e-6, 55e9}, .rows = {2e-6, 1e-8, 55e9}};

}  // namespace

TEST_CASE("cuda ways: what is measured decides, with few runs and with many") {
  // The kernel has a long way to its first byte, and is ahead from a number of short runs on.
  const Machines machines{.kernel = {8e-6, 0, 40e9}, .batch = {2e-6, 6e-7, 55e9}, .rows = {9e-6, 6e-7, 55e9}};
  const auto ways = measured_ways(kEverything, machines.time());
  REQUIRE(ways);
  CHECK(ways->kernel_from[0] > 4);
  CHECK(ways->kernel_from[0] < 32);
  CHECK(ways->kernel_from.back() == kNever);
  // Within what the kernel's multiprocessors are worth of the best, also between the numbers measured.
  CHECK(worst(machines, *ways) < 1.0 / 0.9 + 0.01);
  CHECK(worst(machines, usual_ways(kEverything)) > 2);  // control: a constant is not
  for (const Machines& other : {kFastKernel, kFastBatches, kFastRows}) {
    const auto by_those = measured_ways(kEverything, other.time());
    REQUIRE(by_those);
    CHECK(worst(other, *by_those) < 1.0 / 0.9 + 0.01);
    CHECK(by_those->rows_first[0] == (other.rows.copy_s < other.batch.copy_s));
    // Without batches the kernel is beside single calls, which blocks that lie anywhere need, and not beside
    // rows.
    const auto without = measured_ways({true, false, 1 << 20}, other.time());
    REQUIRE(without);
    CHECK(worst(other, *without, Path::kSingle) < 1.0 / 0.9 + 0.01);
  }
  // Ahead with as many runs as are measured, and behind with as many as a piece may have.
  const Machines late{.kernel = {0, 1.9e-7, 1e15}, .batch = {60e-6, 1e-7, 1e15}, .rows = {1, 1, 55e9}};
  const auto by_late = measured_ways(kEverything, late.time());
  REQUIRE(by_late);
  CHECK(by_late->kernel_from[0] == kNever);
}

TEST_CASE("cuda ways: without a time of the copy engine, or of the kernel, nothing is chosen") {
  const auto silent = [](Path wanted) {
    return [wanted](Path path, int64_t, int64_t) { return path == wanted ? 0.0 : 1e-3; };
  };
  CHECK_FALSE(measured_ways(kEverything, silent(Path::kBatch)));
  CHECK_FALSE(measured_ways(kEverything, silent(Path::kKernel)));
  CHECK_FALSE(measured_ways({true, false, 1 << 20}, silent(Path::kSingle)));
  CHECK(measured_ways(kEverything, silent(Path::kPitched)));
  CHECK(measured_ways({false, true, 0}, silent(Path::kKernel)));
}

TEST_CASE("cuda ways: runs count by length over all pages of a piece") {
  Ways ways = usual_ways({});
  ways.kernel_from[0] = 8;
  const Segment segments[] = {
      {1 << 20, 1, 4096, 0, 0}, {1 << 21, 1, 4000, 4096, 1}, {1 << 22, 1, 300 << 10, 9000, 1}};
  CHECK(split_runs(segments, 3, ways).by_kernel.empty());  // six
  CHECK(split_runs(segments, 4, ways).by_kernel.size() == 2);
  CHECK(split_runs(segments, 400, ways).by_engine.size() == 1);  // longer than all that is measured
  CHECK(to_string(ways) == "kernel for runs of 4 KiB from 8 runs on");
}

TEST_CASE("cuda ways: a piece is what the link moves in a tenth of a millisecond") {
  constexpr int64_t kMost = 8 << 20;
  CHECK(piece_bytes(0, kMost) == kMost);
  CHECK(piece_bytes(1e9, kMost) == 1 << 20);
  CHECK(piece_bytes(25e9, kMost) == 2 << 20);
  CHECK(piece_bytes(55e9, kMost) == 5 << 20);
  CHECK(piece_bytes(400e9, kMost) == kMost);
  CHECK(piece_bytes(1e300, kMost) == kMost);
  // Two of them and the engine's own copy: below 0.3 ms on any link of at least 11 GB/s.
  for (double rate = 11e9; rate < 500e9; rate += 1e9) {
    CHECK(2 * static_cast<double>(piece_bytes(rate, kMost)) / rate < 0.3e-3);
  }
}

TEST_CASE("cuda ways: a lane goes by what its device shows, and every byte arrives") {
  struct Case {
    const Machines& machines;
    Path path;
  };
  for (const Case& given : {Case{kFastKernel, Path::kKernel}, Case{kFastBatches, Path::kBatch},
                            Case{kFastRows, Path::kPitched}}) {
    CudaShape shape;
    shape.layers = 8;
    shape.run_bytes = 8 << 10;
    CudaWorld world(shape, settings_of(given.machines), kMeasured);
    const Copier& copier = world.lane->copier();
    CHECK(copier.notes().empty());
    CHECK(copier.link_rate(Direction::kToDevice) > 50e9);
    CHECK(copier.link_rate(Direction::kToDevice) < 55e9);
    CAPTURE(to_string(copier.ways(Direction::kToHost)));
    for (const Path path : {Path::kKernel, Path::kBatch, Path::kPitched, Path::kSingle}) {
      CHECK(copier.count(path).bytes == 0);  // the trials are nobody's pages
    }
    for (int32_t block = 0; block < 4; ++block) world.fill(block, block + 7);
    CHECK(world.run(world.op(OpKind::kD2H, {0, 1, 2, 3}, {4, 5, 6, 7})).status == Status::kOk);
    CHECK(world.run(world.op(OpKind::kH2D, {8, 9, 10, 11}, {4, 5, 6, 7})).status == Status::kOk);
    for (int32_t block = 0; block < 4; ++block) CHECK(world.holds(8 + block, block + 7));
    CHECK(copier.count(given.path).pieces == 2);
  }
}

TEST_CASE("cuda ways: on a slower link less is under way at once") {
  for (const bool measure : {true, false}) {
    CAPTURE(measure);
    Machines slow = kFastBatches;
    slow.single.bytes_per_s = 25e9;
    CudaShape shape;
    shape.layers = 4;
    shape.blocks = 24;
    shape.run_bytes = 256 << 10;
    CudaWorld world(shape, settings_of(slow), {.batch = true, .kernel = false, .measure = measure});
    const int64_t piece = measure ? 2 << 20 : kSubBatchBytes;
    CHECK(world.lane->piece_bytes(OpKind::kD2H) == piece);
    fake_cuda::hold_all(true);
    const int64_t before = fake_cuda::calls().bytes;
    std::vector<int32_t> all(24);
    for (int32_t i = 0; i < 24; ++i) all[static_cast<size_t>(i)] = i;
    const int64_t ticket = world.submit(world.op(OpKind::kD2H, all, all));
    const auto deadline = deadline_in(CudaWorld::kLongS);
    while (fake_cuda::calls().bytes - before < 2 * piece && seconds_until(deadline) > 0) {
      std::this_thread::yield();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // for what should not come
    CHECK(fake_cuda::calls().bytes - before == 2 * piece);
    fake_cuda::hold_all(false);
    CHECK(world.engine->wait(ticket, CudaWorld::kLongS));
  }
}

TEST_CASE("cuda ways: a page longer than a piece goes in portions of one") {
  Machines slow = kFastBatches;
  slow.single.bytes_per_s = 12e9;
  CudaShape shape;
  shape.layers = 3;
  shape.blocks = 3;
  shape.run_bytes = 1536 << 10;
  shape.extent_slots = 1;
  CudaWorld world(shape, settings_of(slow), {.batch = true, .kernel = false, .measure = true});
  CHECK(world.lane->piece_bytes(OpKind::kH2D) == 1 << 20);
  world.fill(1, 42);
  CHECK(world.run(world.op(OpKind::kD2H, {1}, {2})).status == Status::kOk);
  CHECK(world.run(world.op(OpKind::kH2D, {0}, {2})).status == Status::kOk);
  CHECK(world.holds(0, 42));
  // 4.5 MiB there and back.
  CHECK(world.lane->copier().count(Path::kBatch).pieces + world.lane->copier().count(Path::kSingle).pieces ==
        10);
}

TEST_CASE("cuda ways: what cannot be measured is said, and goes by the constants") {
  // The kernel is ahead of all there is: what was measured would be other ways.
  Machines fast = kFastKernel;
  fast.kernel.piece_s = 0;
  const auto by_constants = [](const CudaLane& lane) {
    return lane.copier().ways(Direction::kToHost) == usual_ways(lane.copier().capabilities());
  };
  {
    CudaWorld world({}, {}, kMeasured);  // a clock that stands still
    CHECK(world.lane->copier().notes() ==
          "copies to the device could not be timed; copies to the host could not be timed");
    CHECK(by_constants(*world.lane));
    CHECK(world.lane->piece_bytes(OpKind::kH2D) == kSubBatchBytes);
    world.fill(0, 3);
    CHECK(world.run(world.op(OpKind::kD2H, {0}, {1})).status == Status::kOk);
    CHECK(world.slot_holds(1, 3));
  }
  CudaWorld world({}, settings_of(fast), kMeasured);
  CHECK_FALSE(by_constants(*world.lane));  // control
  CHECK(world.lane->piece_bytes(OpKind::kH2D) < kSubBatchBytes);
  fake_cuda::refuse("cuMemHostAlloc", 2);  // to try rows with, and to measure with
  const CudaLane lane(world.device, fake_cuda::kernel_launcher(),
                      {.batch = false, .kernel = false, .measure = true});
  CHECK(lane.copier().notes().find("no copies of rows: self-test: cuMem") != std::string::npos);
  CHECK(lane.copier().notes().find("copies were not measured: cuMem") != std::string::npos);
  CHECK(lane.piece_bytes(OpKind::kH2D) == kSubBatchBytes);
}

TEST_CASE("cuda ways: a copy that fails while it is tried leaves the constants, or the way aside") {
  CudaWorld world({}, settings_of(kFastKernel), kMeasured);
  int untimed = 0;
  for (int64_t nth = 0; nth < 48; nth += 3) {
    CAPTURE(nth);
    fake_cuda::fail_copy(nth);
    const CudaLane lane(world.device, fake_cuda::kernel_launcher(), kMeasured);
    fake_cuda::fail_copy(-1);
    CHECK_FALSE(lane.copier().notes().empty());
    untimed += lane.copier().notes().find("could not be timed") != std::string::npos ? 1 : 0;
  }
  CHECK(untimed > 10);
}

TEST_CASE("cuda ways: rows that bring other bytes are not used") {
  fake_cuda::Settings settings = settings_of(kFastRows);
  settings.rows_corrupt = true;
  CudaWorld world({}, settings, kMeasured);
  CHECK(world.lane->copier().notes() == "no copies of rows: self-test: other bytes came back");
  CHECK(world.lane->copier().capabilities().max_pitch_bytes == 0);
  CHECK_FALSE(world.lane->copier().ways(Direction::kToHost).rows_first[0]);
}

TEST_CASE("cuda ways: a graph that is captured meanwhile comes out whole") {
  CudaWorld world({}, settings_of(kFastKernel), kMeasured);
  const Current engine(*world.device);
  fake_cuda::begin_capture(world.stream);
  std::thread([&] {
    const CudaLane lane(world.device, fake_cuda::kernel_launcher(), kMeasured);
    CHECK(lane.copier().link_rate(Direction::kToHost) > 0);
  }).join();
  CHECK(fake_cuda::end_capture(world.stream));
}
