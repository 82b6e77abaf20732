// Tests two fake devices in one process. Each device has its own context, streams and transfer engine, and
// both devices use the same registered host pool.
#include <doctest/doctest.h>

#include <array>
#include <cstring>
#include <thread>

#include "cuda_world.h"

using namespace flexkv;

namespace {

// The objects of one rank's worker process: a pool on the rank's device, and a transfer engine.
struct DeviceRank {
  static constexpr int32_t kLayers = 3, kBlocks = 8;
  static constexpr int64_t kRunBytes = 4096;

  DeviceRank(int ordinal, const cuda::Driver& driver, const std::shared_ptr<HostPool>& pool)
      : device(cuda::Device::open(ordinal, driver)),
        memory(static_cast<size_t>(kLayers * kBlocks * kRunBytes)),
        stream(fake_cuda::make_stream(false, ordinal)) {
    std::vector<Segment> runs;
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      runs.push_back({reinterpret_cast<uintptr_t>(memory.data() + layer * kBlocks * kRunBytes), kRunBytes,
                      kRunBytes, layer * kRunBytes, layer});
    }
    lane = std::make_shared<cuda::CudaLane>(device, fake_cuda::copy_kernels(), cuda::CopySwitches{});
    engine = std::make_unique<TransferEngine>(nullptr, EngineOptions{.queue_ops = 64, .copy_threads = 1},
                                              std::vector<std::shared_ptr<Lane>>{lane});
    engine->attach_view(0, std::make_shared<KvView>(runs, kBlocks, kLayers * kRunBytes), pool, 0, kNoDigests);
  }
  ~DeviceRank() {
    CHECK(engine->close(CudaWorld::kLongS));
    engine.reset();
    lane.reset();
    fake_cuda::destroy_stream(stream);
  }

  void fill(int seed) {
    for (size_t i = 0; i < memory.size(); ++i)
      memory[i] = static_cast<std::byte>(seed * 31 + i * 7 + (i >> 9));
  }
  Status move(OpKind kind, int32_t block, int32_t slot, int64_t op_id) {
    OpSpec spec;
    spec.op_id = op_id;
    spec.kind = kind;
    spec.blocks = {block};
    spec.slots = {slot};
    GraphSpec graph;
    graph.ops.push_back(spec);
    const auto ticket = engine->submit(std::move(graph), stream);
    if (!ticket || !engine->wait(*ticket, CudaWorld::kLongS)) return Status::kFailed;
    return engine->poll(1).front().status;
  }
  std::vector<std::byte> block(int32_t number) const {
    std::vector<std::byte> bytes;
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      const auto begin = memory.begin() + (layer * kBlocks + number) * kRunBytes;
      bytes.insert(bytes.end(), begin, begin + kRunBytes);
    }
    return bytes;
  }

  const std::shared_ptr<cuda::Device> device;
  std::vector<std::byte> memory;
  const uintptr_t stream;
  std::shared_ptr<cuda::CudaLane> lane;
  std::unique_ptr<TransferEngine> engine;
};

}  // namespace

TEST_CASE("cuda devices: two in one process copy at once, each in its own context") {
  fake_cuda::reset({.devices = 2});
  const cuda::LoadedDriver loaded = cuda::find_functions(fake_cuda::finder());
  {
    const int64_t slot_bytes = round_up(DeviceRank::kLayers * DeviceRank::kRunBytes, kIoAlignBytes);
    const auto pool = HostPool::create({slot_bytes, 2 * DeviceRank::kBlocks, 4 * slot_bytes}, {});
    DeviceRank first(0, loaded.driver, pool);
    DeviceRank second(1, loaded.driver, pool);
    // The pool is registered only once, because a portable registration is valid for all devices.
    pool->pin(cuda::make_registrar(first.device));
    pool->pin(cuda::make_registrar(second.device));
    REQUIRE(pool->wait_ready(2 * DeviceRank::kBlocks, CudaWorld::kLongS));
    const auto deadline = deadline_in(CudaWorld::kLongS);
    while (pool->pinned_slots() < 2 * DeviceRank::kBlocks && seconds_until(deadline) > 0)
      std::this_thread::yield();
    CHECK(fake_cuda::registered().size() == 4);

    std::array<DeviceRank*, 2> ranks = {&first, &second};
    std::array<std::vector<std::byte>, 2> wanted;
    std::array<std::thread, 2> threads;
    std::array<bool, 2> good = {true, true};
    for (size_t i = 0; i < ranks.size(); ++i) {
      ranks[i]->fill(static_cast<int>(i) + 1);
      wanted[i] = ranks[i]->block(2);
      threads[i] = std::thread([&, i] {
        int64_t op_id = 1;
        for (int turn = 0; turn < 20 && good[i]; ++turn) {
          const auto slot = static_cast<int32_t>(i) * DeviceRank::kBlocks + turn % DeviceRank::kBlocks;
          good[i] = ranks[i]->move(OpKind::kD2H, 2, slot, op_id++) == Status::kOk &&
                    ranks[i]->move(OpKind::kH2D, 5, slot, op_id++) == Status::kOk;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(good == std::array{true, true});
    CHECK(first.block(5) == wanted[0]);
    CHECK(second.block(5) == wanted[1]);
    const std::map<int, int64_t> bytes = fake_cuda::calls().bytes_of_device;
    CHECK(bytes.at(0) > 0);
    CHECK(bytes.at(0) == bytes.at(1));

    // Control: the fake records a broken rule for a copy on a stream of another device.
    const cuda::Current other(*second.device);
    std::byte byte{};
    loaded.driver.copy_to_host(&byte, reinterpret_cast<uintptr_t>(first.memory.data()), 1,
                               reinterpret_cast<cuda::StreamHandle>(first.stream));
    CHECK(fake_cuda::take_violation("a stream of a device that is not current"));
    fake_cuda::drain(first.stream);
  }
  CHECK(fake_cuda::registered().empty());
  for (const std::string& rule : fake_cuda::violations()) FAIL_CHECK("broken rule: " << rule);
}
