// Pools and staging slots for tests of the layout transform.
#pragma once
#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "gds/page_map.h"
#include "gds/transform/device.h"

namespace flexkv {

using ByteVector = std::vector<unsigned char>;

inline ByteVector random_bytes(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  ByteVector bytes(count);
  for (auto& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

// Overwrites the bytes in place. An assignment might move them to other addresses, and views hold addresses.
inline void put(ByteVector& target, const ByteVector& bytes) {
  std::copy(bytes.begin(), bytes.end(), target.begin());
}

// A pool of `layers` separate regions, which begin `skew` bytes past aligned addresses, and slots with
// digests.
struct TransformWorld {
  TransformWorld(int32_t layers, int64_t run_bytes, int64_t skew, int64_t blocks)
      : run(run_bytes), stride(run_bytes + skew), num_blocks(blocks) {
    pool = random_bytes(static_cast<size_t>(layers * (blocks * stride + 64) + skew + 16), 1);
    std::vector<Segment> runs;
    auto base = reinterpret_cast<uintptr_t>(pool.data());
    base = (base + 15) / 16 * 16 + static_cast<uintptr_t>(skew);
    for (int32_t layer = 0; layer < layers; ++layer) {
      runs.push_back({base + static_cast<uintptr_t>(layer * (blocks * stride + 32)), stride, run_bytes,
                      layer * run_bytes, layer});
    }
    view = std::make_unique<KvView>(runs, blocks, layers * run_bytes);
    digest_offset = (layers * run_bytes + 4095) / 4096 * 4096;
    image_bytes = digest_offset + (8 * layers + 4095) / 4096 * 4096;
    map = std::make_unique<PageMap>(
        PageMap::stripe(*view, {0, digest_offset, digest_offset, image_bytes}, true));
    slots = random_bytes(static_cast<size_t>(image_bytes * blocks + 16), 2);
  }

  uintptr_t slot(int64_t i) const {
    return (reinterpret_cast<uintptr_t>(slots.data()) + 15) / 16 * 16 +
           static_cast<uintptr_t>(i * image_bytes);
  }
  std::vector<TransformPage> pages() const {
    std::vector<TransformPage> answer;
    for (int64_t i = 0; i < num_blocks; ++i) answer.push_back({slot(i), num_blocks - 1 - i});
    return answer;
  }
  BatchResult move(TransformDevice& device, bool into_pool) const {
    const auto transformer = device.transformer(*map, into_pool, static_cast<int32_t>(num_blocks));
    transformer->launch(pages());
    return transformer->wait();
  }

  int64_t run, stride, num_blocks, digest_offset = 0, image_bytes = 0;
  ByteVector pool, slots;
  std::unique_ptr<KvView> view;
  std::unique_ptr<PageMap> map;
};

}  // namespace flexkv
