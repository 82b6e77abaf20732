// An engine's pool in the memory of a fake device (see fake_cuda.h), a host pool, and a transfer engine with
// a CUDA lane.
#pragma once
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "cuda/cuda_lane.h"
#include "fake_cuda.h"
#include "transfer/engine.h"

namespace flexkv {

// Registers memory with the fake driver, but refuses the registration with number `refused`, counted from 0.
class RefusingRegistrar : public Registrar {
 public:
  RefusingRegistrar(std::shared_ptr<Registrar> inner, int refused)
      : inner_(std::move(inner)), refused_(refused) {}
  std::string add(void* base, int64_t bytes) override {
    return added_++ == refused_ ? "refused" : inner_->add(base, bytes);
  }
  void remove(void* base) override { inner_->remove(base); }

 private:
  const std::shared_ptr<Registrar> inner_;
  const int refused_;
  int added_ = 0;
};

struct CudaShape {
  int32_t layers = 3;
  int32_t blocks = 12;
  int64_t run_bytes = 1024;
  bool block_first = false;
  bool digests = false;
  int64_t extent_slots = 4;
  bool apart = false;        // each layer is a separate allocation, directly after the previous layer in
                             // memory
  bool exact_slots = false;  // the pages of adjacent slots have no gap between them; the page size must be a
                             // multiple of 4 KiB
};

// With kAll, a lane may use every copy path. With kSingle, it uses neither batches nor the kernel.
inline constexpr cuda::CopySwitches kAll{.batch = true, .kernel = true};
inline constexpr cuda::CopySwitches kSingle{.batch = false, .kernel = false};

// Unit: seconds. How long a test waits before it concludes that an event does not happen. Control tests, in
// which the event happens, show that this time is long enough.
inline constexpr double kAWhileS = 0.2;

struct CudaWorld {
  static constexpr double kLongS = 60;

  CudaWorld(const CudaShape& shape, const fake_cuda::Settings& settings, const cuda::CopySwitches& switches,
            int refused_piece = -1, std::unique_ptr<DigestCrew> digests = std::make_unique<DigestCrew>())
      : shape_(shape), memory(static_cast<size_t>(shape.layers * shape.blocks * shape.run_bytes)) {
    fake_cuda::reset(settings);
    loaded = cuda::find_functions(fake_cuda::finder());
    REQUIRE_MESSAGE(loaded.missing.empty(), loaded.missing);
    device = cuda::Device::open(0, loaded.driver);
    const int64_t layer_bytes = shape.blocks * shape.run_bytes;
    for (int32_t layer = 0; shape.apart && layer < shape.layers; ++layer) {
      fake_cuda::add_allocation(memory.data() + layer * layer_bytes, static_cast<size_t>(layer_bytes));
    }
    std::vector<Segment> runs;
    const int64_t page = shape.layers * shape.run_bytes;
    for (int32_t layer = 0; layer < shape.layers; ++layer) {
      const int64_t offset =
          shape.block_first ? layer * shape.run_bytes : layer * shape.blocks * shape.run_bytes;
      runs.push_back({reinterpret_cast<uintptr_t>(memory.data()) + static_cast<uintptr_t>(offset),
                      shape.block_first ? page : shape.run_bytes, shape.run_bytes, layer * shape.run_bytes,
                      layer});
    }
    view = std::make_shared<KvView>(runs, shape.blocks, page);
    const int64_t slot_bytes = round_up(page, kIoAlignBytes) + (shape.exact_slots ? 0 : kIoAlignBytes);
    pool = HostPool::create({slot_bytes, shape.blocks, shape.extent_slots * slot_bytes}, {});
    // This pool registers each extent with one call.
    pool->pin(std::make_shared<RefusingRegistrar>(cuda::make_registrar(device), refused_piece), {.tries = 0});
    REQUIRE(pool->wait_ready(shape.blocks, kLongS));
    const auto deadline = deadline_in(kLongS);
    while (pool->pinned_slots() < shape.blocks && seconds_until(deadline) > 0) std::this_thread::yield();
    lane = std::make_shared<cuda::CudaLane>(device, fake_cuda::copy_kernels(), switches, std::move(digests));
    make_engine(lane);
    stream = fake_cuda::make_stream(false);
  }
  ~CudaWorld() {
    fake_cuda::hold_all(false);
    CHECK(engine->close(kLongS));
    engine.reset();
    lane.reset();
    fake_cuda::destroy_stream(stream);
    for (const std::string& rule : fake_cuda::violations()) FAIL_CHECK("broken rule: " << rule);
  }

  void make_engine(std::shared_ptr<Lane> device_lane, double op_stuck_s = 30) {
    engine = std::make_unique<TransferEngine>(
        nullptr, EngineOptions{.queue_ops = 64, .copy_threads = 1, .op_stuck_s = op_stuck_s},
        std::vector<std::shared_ptr<Lane>>{std::move(device_lane)});
    engine->attach_view(0, view, pool, 0,
                        shape_.digests ? round_up(view->stripe_bytes(), kIoAlignBytes) : kNoDigests);
  }

  OpSpec op(OpKind kind, std::vector<int32_t> blocks, std::vector<int32_t> slots, bool layerwise = false) {
    OpSpec spec;
    spec.op_id = next_op++;
    spec.kind = kind;
    spec.priority = kind == OpKind::kH2D ? Priority::kLoad : Priority::kStore;
    spec.blocks = std::move(blocks);
    spec.slots = std::move(slots);
    spec.layerwise = layerwise;
    return spec;
  }
  int64_t submit(const OpSpec& spec) {
    GraphSpec graph;
    graph.ops.push_back(spec);
    const auto ticket = engine->submit(std::move(graph), stream);
    REQUIRE(ticket);
    return *ticket;
  }
  OpResult run(const OpSpec& spec) {
    REQUIRE(engine->wait(submit(spec), kLongS));
    const auto results = engine->poll(1);
    REQUIRE(results.size() == 1);
    return results.front();
  }

  std::byte* run_of(int32_t layer, int32_t block) const {
    return reinterpret_cast<std::byte*>(run_address(view->runs()[static_cast<size_t>(layer)], block));
  }
  void fill(int32_t block, int seed) {
    for (int32_t layer = 0; layer < shape_.layers; ++layer) fill_layer(layer, block, seed);
  }
  void fill_layer(int32_t layer, int32_t block, int seed) {
    const std::vector<std::byte>& bytes = period(seed, layer);
    for (int64_t at = 0; at < shape_.run_bytes; at += kPeriodBytes) {
      std::memcpy(run_of(layer, block) + at, bytes.data(), period_bytes(at));
    }
  }
  bool holds(int32_t block, int seed) const {
    for (int32_t layer = 0; layer < shape_.layers; ++layer) {
      if (!layer_holds(layer, block, seed)) return false;
    }
    return true;
  }
  bool layer_holds(int32_t layer, int32_t block, int seed) const {
    return is_run(run_of(layer, block), seed, layer);
  }
  bool slot_holds(int32_t slot, int seed) const {
    const std::byte* page = pool->slot_address(slot);
    for (int32_t layer = 0; layer < shape_.layers; ++layer) {
      if (!is_run(page + layer * shape_.run_bytes, seed, layer)) return false;
    }
    return true;
  }
  bool is_run(const std::byte* run, int seed, int32_t layer) const {
    const std::vector<std::byte>& bytes = period(seed, layer);
    for (int64_t at = 0; at < shape_.run_bytes; at += kPeriodBytes) {
      if (std::memcmp(run + at, bytes.data(), period_bytes(at)) != 0) return false;
    }
    return true;
  }
  static std::byte value(int seed, int32_t layer, int64_t i) {
    return static_cast<std::byte>(seed * 37 + layer * 101 + i * 7 + (i >> 8));
  }
  // value() repeats after this many bytes. Each thread makes the bytes of a period once. It then copies and
  // compares complete periods, because a loop over every byte of large runs is slow with a sanitizer.
  static constexpr int64_t kPeriodBytes = int64_t{1} << 16;
  size_t period_bytes(int64_t at) const {
    return static_cast<size_t>(std::min(kPeriodBytes, shape_.run_bytes - at));
  }
  static const std::vector<std::byte>& period(int seed, int32_t layer) {
    thread_local std::array<std::vector<std::byte>, 256> made;  // by the period's first byte, which
                                                                // determines the rest
    std::vector<std::byte>& bytes = made[std::to_integer<size_t>(value(seed, layer, 0))];
    if (bytes.empty()) {
      bytes.resize(kPeriodBytes);
      for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = value(seed, layer, static_cast<int64_t>(i));
    }
    return bytes;
  }

  const CudaShape shape_;
  std::vector<std::byte> memory;
  cuda::LoadedDriver loaded;
  std::shared_ptr<cuda::Device> device;
  std::shared_ptr<KvView> view;
  std::shared_ptr<HostPool> pool;
  std::shared_ptr<cuda::CudaLane> lane;
  std::unique_ptr<TransferEngine> engine;
  uintptr_t stream = 0;
  int64_t next_op = 1;
};

inline std::unique_ptr<CudaWorld> make_world(const CudaShape& shape = {}) {
  return std::make_unique<CudaWorld>(shape, fake_cuda::Settings{}, cuda::CopySwitches{});
}

}  // namespace flexkv
