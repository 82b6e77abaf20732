// A transfer engine with the gds lane of one rank: a layer-first pool in host memory and one slab. Faults can
// be injected between the lane and its disk.
#pragma once
#include "gds/gds_lane.h"
#include "gds_world.h"
#include "page_world.h"
#include "transfer/engine.h"
#include "transfer/host_mover.h"

namespace flexkv {

inline constexpr int32_t kLaneLayers = 4, kLaneBlocks = 16, kLanePlaces = 16;
inline constexpr int64_t kLaneRun = 2304, kLaneStripe = kLaneLayers * kLaneRun,
                         kLaneHeader = kSlabHeaderBytes;

struct LaneWorld {
  explicit LaneWorld(std::vector<FileFaultRule> rules, double op_stuck_s = 30)
      : pool(static_cast<size_t>(kLaneLayers * kLaneBlocks * kLaneRun)) {
    std::mt19937 random(3);
    for (auto& byte : pool) byte = static_cast<unsigned char>(random());
    std::vector<Segment> segments;
    for (int32_t layer = 0; layer < kLaneLayers; ++layer) {
      const auto base = reinterpret_cast<uintptr_t>(pool.data() + layer * kLaneBlocks * kLaneRun);
      segments.push_back({base, kLaneRun, kLaneRun, layer * kLaneRun, layer});
    }
    codec = page_codec(kLaneLayers, kLaneRun);
    host = HostPool::create({codec->image_bytes(), 1, kMaxExtentBytes}, {});
    REQUIRE(host->wait_ready(1, kGdsGenerousS));
    const SlabShape shape = make_slab(folder.file("slab"), *codec, kLanePlaces, 7);
    const auto files =
        std::make_shared<RawFiles>(std::vector<std::vector<std::string>>{{folder.file("slab")}});
    io = std::make_shared<FaultyFileIo>(std::make_shared<PosixFileIo>(files), std::move(rules));
    GdsOptions options;
    options.max_staging_blocks = 3;
    options.deadline_s = options.stuck_s = kLongestWaitS;
    device = std::make_shared<FaultyTransformDevice>(host_transform_device());
    auto manager = std::make_shared<GDSManager>(files, options, device, io);
    lane = std::make_shared<GdsLane>(std::vector<GdsGroup>{{codec, {{0, shape}}}}, 0, std::move(manager));
    engine =
        std::make_unique<TransferEngine>(std::make_shared<HostMover>(), EngineOptions{1024, 1, op_stuck_s},
                                         std::vector<std::shared_ptr<Lane>>{lane});
    engine->attach_view(0, std::make_shared<KvView>(segments, kLaneBlocks, kLaneStripe), host, 0);
  }
  ~LaneWorld() {
    io->release();
    CHECK(engine->close(kGdsGenerousS));
  }

  int64_t image_at(int32_t place) const { return kLaneHeader + place * codec->image_bytes(); }
  OpSpec op(OpKind kind, int32_t count) {
    OpSpec spec;
    spec.op_id = next_op++;
    spec.kind = kind;
    for (int32_t i = 0; i < count; ++i) {
      spec.blocks.push_back(i);
      spec.places.push_back(i);
      add_tag(spec, i);
    }
    return spec;
  }
  int64_t submit(OpKind kind, int32_t count) { return submit_op(*engine, op(kind, count)); }
  OpResult run(OpKind kind, int32_t count) {
    REQUIRE(engine->wait(submit(kind, count), kGdsGenerousS));
    auto results = engine->poll(2);
    REQUIRE(results.size() == 1);
    return std::move(results.front());
  }
  // Writes the trailers of pages 0 to count - 1 with the digests that the write reported, as the manager's
  // disk lane does.
  void seal(const OpResult& written, int32_t count) {
    std::fstream file(folder.file("slab"), std::ios::in | std::ios::out | std::ios::binary);
    const size_t runs = codec->num_runs();
    REQUIRE(written.digests.size() == runs * static_cast<size_t>(count));
    for (int32_t place = 0; place < count; ++place) {
      std::vector<std::byte> trailer(static_cast<size_t>(codec->trailer_area_bytes()));
      std::memcpy(trailer.data() + kTrailerHeadBytes,
                  written.digests.data() + static_cast<size_t>(place) * runs, runs * sizeof(uint64_t));
      codec->seal_trailer(trailer.data(), {7, static_cast<uint64_t>(place)}, tag_of(place), 0);
      file.seekp(image_at(place) + codec->image().trailer_offset());
      file.write(reinterpret_cast<const char*>(trailer.data()), static_cast<std::streamsize>(trailer.size()));
    }
  }

  TemporaryFolder folder;
  std::vector<unsigned char> pool;
  std::shared_ptr<const PageCodec> codec;
  std::shared_ptr<HostPool> host;
  std::shared_ptr<FaultyFileIo> io;
  std::shared_ptr<FaultyTransformDevice> device;
  std::shared_ptr<GdsLane> lane;
  std::unique_ptr<TransferEngine> engine;
  int64_t next_op = 1;
};

}  // namespace flexkv
