// A transfer engine with a disk lane of two disks. Faults can be injected between the lane and its disks.
#pragma once
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "io/io_queue.h"
#include "page_world.h"
#include "storage/disk_lane.h"
#include "testing/faulty_queue.h"
#include "transfer/engine.h"
#include "transfer/host_mover.h"

namespace flexkv {

inline constexpr int32_t kWorldDisks = 2;
inline constexpr int32_t kWorldPlaces = 64;
inline constexpr int32_t kWorldSlots = 128;
inline constexpr int32_t kWorldLayers = 3;
inline constexpr int64_t kWorldRun = 2304;  // not a multiple of a sector: adjacent layers share sectors

inline std::vector<IoBackend> disk_backends() {
  std::vector<IoBackend> found{IoBackend::kThreads};
  if (uring_refusal().empty()) found.push_back(IoBackend::kUring);
  return found;
}

struct DiskWorld {
  // `outer` may be null. Otherwise it wraps each disk's queue after the wrapper that injects the faults.
  explicit DiskWorld(IoBackend io, std::vector<IoFaultRule> rules = {}, double stuck_s = 30.0,
                     const WrapQueue& outer = nullptr)
      : faults(std::make_shared<IoFaults>(std::move(rules))) {
    codec = page_codec(kWorldLayers, kWorldRun);
    pool = HostPool::create({codec->image_bytes(), kWorldSlots, kMaxExtentBytes}, {});
    REQUIRE(pool->wait_ready(kWorldSlots, kWaitS));
    std::vector<std::vector<std::shared_ptr<SlabFile>>> slabs;
    for (int32_t disk = 0; disk < kWorldDisks; ++disk) {
      const std::string path = "slab" + std::to_string(disk);
      const SlabShape shape =
          make_slab(path, *codec, kWorldPlaces / kWorldDisks, static_cast<uint64_t>(disk) + 1);
      slabs.push_back({std::make_shared<SlabFile>(path, shape, -1)});
    }
    std::vector<DiskGroup> groups;
    groups.push_back({codec, {}, pool});
    const WrapQueue wrap = [faults = faults, outer](std::unique_ptr<IoQueue> queue, int32_t disk) {
      std::unique_ptr<IoQueue> faulty = std::make_unique<FaultyQueue>(std::move(queue), faults, disk);
      return outer ? outer(std::move(faulty), disk) : std::move(faulty);
    };
    lane = std::make_shared<DiskLane>(std::move(groups), std::move(slabs), DiskOptions{io, 8, stuck_s}, wrap);
    engine = std::make_unique<TransferEngine>(std::make_shared<HostMover>(), EngineOptions{},
                                              std::vector<std::shared_ptr<Lane>>{lane});
  }
  ~DiskWorld() {
    faults->release();
    CHECK(engine->close(kWaitS));
    for (int32_t disk = 0; disk < kWorldDisks; ++disk) std::remove(("slab" + std::to_string(disk)).c_str());
  }

  void fill(int32_t slot, uint8_t value) {
    std::fill_n(reinterpret_cast<uint8_t*>(pool->slot(slot)), kWorldLayers * kWorldRun, value);
  }
  bool holds(int32_t slot, uint8_t value) const {
    const auto* bytes = reinterpret_cast<const uint8_t*>(pool->slot(slot));
    return std::all_of(bytes, bytes + kWorldLayers * kWorldRun, [=](uint8_t byte) { return byte == value; });
  }
  // Submits an op on pages [first, first + count). Page i has disk slot i and host slot base + i. Returns the
  // ticket.
  int64_t submit(OpKind kind, int32_t first, int32_t count, int32_t base, bool layerwise = false) {
    OpSpec op;
    op.op_id = next_op++;
    op.kind = kind;
    op.priority = kind == OpKind::kDiskRead ? Priority::kLoad : Priority::kStore;
    op.layerwise = layerwise;
    for (int32_t i = first; i < first + count; ++i) {
      op.slots.push_back(base + i);
      op.places.push_back(i);
      add_tag(op, i);
    }
    return submit_op(*engine, std::move(op));
  }
  std::vector<OpResult> results(size_t count) {
    std::vector<OpResult> found;
    for (int64_t ticket = 1; ticket < next_op; ++ticket) REQUIRE(engine->wait(ticket, kWaitS));
    while (found.size() < count) {
      auto more = engine->poll(count);
      REQUIRE(!more.empty());
      std::move(more.begin(), more.end(), std::back_inserter(found));
    }
    return found;
  }

  std::shared_ptr<IoFaults> faults;
  std::shared_ptr<const PageCodec> codec;
  std::shared_ptr<HostPool> pool;
  std::shared_ptr<DiskLane> lane;
  std::unique_ptr<TransferEngine> engine;
  int64_t next_op = 1;
};

}  // namespace flexkv
