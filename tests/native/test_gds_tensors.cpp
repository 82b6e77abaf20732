// Tests the transfer templates for tensors. It calls them with a tensor type that has only the members that
// the templates need.
#include <doctest/doctest.h>

#include <vector>

#include "base/error.h"
#include "gds/raw/tensor_transfer.h"
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

namespace {

constexpr int64_t kTensorLayers = 3, kTensorChunk = 1000, kTensorBlocks = 6;

// A dense pool in the layout of one inference engine (`Type`), and calls of the transfer template for this
// engine.
template <BackendType Type>
struct BackendPool {
  BackendPool() : bytes(static_cast<size_t>(kTensorLayers * 2 * kTensorBlocks * kTensorChunk)) {
    const auto tensors = Type == BackendType::TRTLLM ? 1
                         : Type == BackendType::VLLM ? kTensorLayers
                                                     : 2 * kTensorLayers;
    const size_t tensor_bytes = bytes.size() / static_cast<size_t>(tensors);
    for (size_t i = 0; i < static_cast<size_t>(tensors); ++i) {
      pointers.push_back(reinterpret_cast<int64_t*>(bytes.data() + i * tensor_bytes));
    }
  }
  // The address of a run. It follows the layouts that the comments at BackendType describe, independently of
  // the handler's arithmetic.
  unsigned char* run(int64_t layer, int64_t kv, int64_t block) {
    const int64_t index = Type == BackendType::TRTLLM ? (block * kTensorLayers + layer) * 2 + kv
                          : Type == BackendType::VLLM ? (layer * 2 + kv) * kTensorBlocks + block
                                                      : (kv * kTensorLayers + layer) * kTensorBlocks + block;
    return bytes.data() + index * kTensorChunk;
  }
  void move(GDSManager& manager, bool is_read) {
    const int64_t kv_stride = Type == BackendType::TRTLLM ? kTensorChunk : kTensorBlocks * kTensorChunk;
    const int64_t block_stride =
        Type == BackendType::TRTLLM ? 2 * kTensorLayers * kTensorChunk : kTensorChunk;
    const GTensorHandler handler(Type, pointers.data(), kTensorLayers, kv_stride, block_stride,
                                 Type == BackendType::TRTLLM ? 2 * kTensorChunk : 0);
    const std::vector<int32_t> layers{0, 1, 2};
    const std::vector<int64_t> ssd{4, 1, 3, 0}, gpu{0, 2, 3, 5};
    // On disk a block has the K of every layer, then the V of every layer. No engine's pool has this order,
    // so every transfer goes through staging.
    transfer_kv_blocks_gds_staged<Type>(manager, tensor(layers), handler, tensor(ssd), tensor(gpu),
                                        kTensorChunk, kTensorLayers * 2 * kTensorChunk,
                                        kTensorLayers * kTensorChunk, kTensorChunk, 0, 3, kTensorLayers,
                                        is_read);
  }

  std::vector<unsigned char> bytes;
  std::vector<int64_t*> pointers;
};

unsigned char byte_of(int64_t layer, int64_t kv, int64_t block, int64_t i) {
  return static_cast<unsigned char>(block * 53 + layer * 17 + kv * 5 + i * 3 + (i >> 8));
}

template <BackendType From, BackendType To>
void move_between_backends() {
  const TemporaryFolder folder;
  GDSManager manager({{folder.file("a")}, {folder.file("b")}}, {}, host_transform_device());
  BackendPool<From> from;
  BackendPool<To> to;
  const auto each = [&](auto visit) {
    for (int64_t layer = 0; layer < kTensorLayers; ++layer) {
      for (int64_t kv = 0; kv < 2; ++kv) {
        for (int64_t block = 0; block < kTensorBlocks; ++block) visit(layer, kv, block);
      }
    }
  };
  each([&](int64_t layer, int64_t kv, int64_t block) {
    for (int64_t i = 0; i < kTensorChunk; ++i) from.run(layer, kv, block)[i] = byte_of(layer, kv, block, i);
  });
  std::fill(to.bytes.begin(), to.bytes.end(), 0xEE);
  from.move(manager, false);
  to.move(manager, true);
  CHECK(manager.totals().launches > 0);
  int64_t wrong = 0;
  each([&](int64_t layer, int64_t kv, int64_t block) {
    const bool moved = block == 0 || block == 2 || block == 3 || block == 5;
    for (int64_t i = 0; i < kTensorChunk; ++i) {
      wrong += to.run(layer, kv, block)[i] != (moved ? byte_of(layer, kv, block, i) : 0xEE);
    }
  });
  CHECK(wrong == 0);
}

}  // namespace

TEST_CASE("the staged template moves the blocks of every backend, and what one stored any other loads") {
  move_between_backends<BackendType::SGLANG, BackendType::SGLANG>();
  move_between_backends<BackendType::TRTLLM, BackendType::TRTLLM>();
  move_between_backends<BackendType::VLLM, BackendType::SGLANG>();
  move_between_backends<BackendType::SGLANG, BackendType::TRTLLM>();
  move_between_backends<BackendType::TRTLLM, BackendType::VLLM>();
}
