// An engine's pool in ordinary memory, a host pool, and a transfer engine that moves pages between the two
// pools.
#pragma once
#include <doctest/doctest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "testing/faulty_mover.h"
#include "transfer/engine.h"
#include "transfer/host_mover.h"

namespace flexkv {

// Unit: seconds. How long a test waits for an event that must happen. The time is enough even on a busy
// machine and with a sanitizer.
inline constexpr double kGenerousS = 60;

struct TransferWorld {
  static constexpr int64_t kRunBytes = 1024;
  static constexpr int32_t kLayers = 4;
  static constexpr int64_t kPageBytes = kRunBytes * kLayers;

  TransferWorld(int32_t blocks, EngineOptions options, std::vector<FaultRule> rules = {}, bool shared = false)
      : memory(static_cast<size_t>(blocks * kPageBytes)) {
    std::vector<Segment> runs;
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      runs.push_back({reinterpret_cast<uintptr_t>(memory.data() + layer * blocks * kRunBytes), kRunBytes,
                      kRunBytes, layer * kRunBytes, layer});
    }
    view = std::make_shared<KvView>(runs, blocks, kPageBytes);
    pool = HostPool::create({2 * kPageBytes, blocks, kMaxExtentBytes}, {.shared = shared});
    REQUIRE(pool->wait_ready(blocks, kGenerousS));
    mover = std::make_shared<FaultyMover>(std::make_shared<HostMover>(), std::move(rules));
    engine = std::make_unique<TransferEngine>(mover, options);
    engine->attach_view(0, view, pool, 0, kPageBytes);
  }

  void fill(int32_t block, uint8_t value) {
    for (const Segment& run : view->runs()) {
      std::memset(reinterpret_cast<void*>(run_address(run, block)), value, kRunBytes);
    }
  }
  bool holds(int32_t block, uint8_t value) const {
    for (const Segment& run : view->runs()) {
      const auto* bytes = reinterpret_cast<const uint8_t*>(run_address(run, block));
      for (int64_t i = 0; i < kRunBytes; ++i) {
        if (bytes[i] != value) return false;
      }
    }
    return true;
  }

  std::vector<std::byte> memory;
  std::shared_ptr<KvView> view;
  std::shared_ptr<HostPool> pool;
  std::shared_ptr<FaultyMover> mover;
  std::unique_ptr<TransferEngine> engine;
};

}  // namespace flexkv
