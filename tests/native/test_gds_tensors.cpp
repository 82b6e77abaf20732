// The templates over tensors, with a tensor type that has just the members they need.
#include <doctest/doctest.h>

#include <vector>

#include "base/error.h"
#include "gds/tensor_transfer.h"
#include "gds_world.h"

using namespace flexkv;

namespace {

struct PlainTensor {
  const void* data = nullptr;
  int64_t count = 0;
  size_t item_bytes = 8;
  bool contiguous = true, cpu = true;
  void* data_ptr() const { return const_cast<void*>(data); }
  int64_t numel() const { return count; }
  size_t element_size() const { return item_bytes; }
  bool is_contiguous() const { return contiguous; }
  bool is_cpu() const { return cpu; }
};

template <typename T>
PlainTensor tensor(const std::vector<T>& values) {
  return {values.data(), static_cast<int64_t>(values.size()), sizeof(T)};
}

}  // namespace

TEST_CASE("the staged template moves blocks both ways, with the manager's staging and with a caller's") {
  constexpr int64_t kLayers = 3, kChunk = 4096, kBlocks = 6;
  const TemporaryFolder folder;
  GDSManager manager({{folder.file("a")}, {folder.file("b")}}, {}, host_transform_device());
  std::vector<unsigned char> pool(kLayers * 2 * kBlocks * kChunk);
  for (size_t i = 0; i < pool.size(); ++i) pool[i] = static_cast<unsigned char>(i * 31 + i / 4096);
  const auto content = pool;
  std::vector<int64_t*> pointers;
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    pointers.push_back(reinterpret_cast<int64_t*>(pool.data() + layer * 2 * kBlocks * kChunk));
  }
  const GTensorHandler handler(BackendType::VLLM, pointers.data(), kLayers, kBlocks * kChunk, kChunk, 0);
  const std::vector<int32_t> layers{0, 1, 2};
  const std::vector<int64_t> ssd{4, 1, 3, 0, 2, 5}, gpu{0, 1, 2, 3, 4, 5};
  std::vector<unsigned char> staging(static_cast<size_t>(kBlocks * kLayers * 2 * kChunk) + 4096);
  void* aligned = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(staging.data()) + 4095) / 4096 * 4096);
  const auto move = [&](bool is_read, void* buffer) {
    transfer_kv_blocks_gds_staged<BackendType::VLLM>(manager, tensor(layers), handler, tensor(ssd),
                                                     tensor(gpu), 2 * kChunk, kLayers * 2 * kChunk, kChunk,
                                                     kChunk, 0, 3, kLayers, is_read, buffer);
  };
  move(false, nullptr);
  std::fill(pool.begin(), pool.end(), 0);
  move(true, aligned);
  CHECK(pool == content);
  CHECK(manager.totals().io_calls == 2 * kBlocks);
  std::fill(pool.begin(), pool.end(), 0);
  transfer_kv_blocks_gds<BackendType::VLLM>(manager, tensor(layers), handler, tensor(ssd), tensor(gpu),
                                            2 * kChunk, kLayers * 2 * kChunk, kChunk, kChunk, 0, 3, kLayers,
                                            true);
  CHECK(pool == content);
  CHECK(manager.totals().io_calls == 2 * kBlocks + kBlocks * kLayers * 2);

  const auto refused = [&](const PlainTensor& blocks) {
    CHECK_THROWS_AS(transfer_kv_blocks_gds<BackendType::VLLM>(manager, tensor(layers), handler, tensor(ssd),
                                                              blocks, 2 * kChunk, kLayers * 2 * kChunk,
                                                              kChunk, kChunk, 0, 3, kLayers, true),
                    GeometryError);
  };
  PlainTensor wrong = tensor(gpu);
  wrong.cpu = false;
  refused(wrong);
  wrong = tensor(gpu);
  wrong.contiguous = false;
  refused(wrong);
  refused(tensor(layers));
  CHECK_THROWS_AS(transfer_kv_blocks_gds<BackendType::SGLANG>(manager, tensor(layers), handler, tensor(ssd),
                                                              tensor(gpu), 2 * kChunk, kLayers * 2 * kChunk,
                                                              kChunk, kChunk, 0, 3, kLayers, true),
                  GeometryError);
}
