// A separate library that calls the transfer templates with libtorch's tensors.
#include <torch/types.h>

#include <string>
#include <vector>

#include "gds/io_choice.h"
#include "gds/raw/tensor_transfer.h"

namespace {

using flexkv::BackendType;
constexpr int64_t kLayers = 4, kKv = 2, kBlocks = 8, kChunk = 1024;

template <BackendType Type>
struct Pool {
  torch::Tensor memory =
      at::randint(0, 256,
                  Type == BackendType::TRTLLM ? std::vector<int64_t>{kBlocks, kLayers, kKv, kChunk}
                  : Type == BackendType::VLLM ? std::vector<int64_t>{kLayers, kKv, kBlocks, kChunk}
                                              : std::vector<int64_t>{kKv, kLayers, kBlocks, kChunk},
                  torch::kUInt8);
  // Returns a view [block][layer][kv][chunk] of the pool, whatever the backend's own order.
  torch::Tensor by_block() const {
    if constexpr (Type == BackendType::TRTLLM) return memory;
    if constexpr (Type == BackendType::VLLM) return memory.permute({2, 0, 1, 3});
    return memory.permute({2, 1, 0, 3});
  }
  std::vector<int64_t*> pointers() const {
    std::vector<torch::Tensor> tensors;
    if constexpr (Type == BackendType::TRTLLM) {
      tensors = {memory};
    } else if constexpr (Type == BackendType::VLLM) {
      tensors = memory.unbind();
    } else {
      tensors = memory.flatten(0, 1).unbind();
    }
    std::vector<int64_t*> addresses;
    for (const torch::Tensor& tensor : tensors) addresses.push_back(static_cast<int64_t*>(tensor.data_ptr()));
    return addresses;
  }
};

// Stores blocks of the backend's pool and loads them again. Returns 0 if every byte came back, and no byte
// outside of the blocks changed.
template <BackendType Type>
int round_trip(const std::string& path) {
  flexkv::GDSManager manager({{path}}, {}, flexkv::choose_device(flexkv::kHostDevice, 0));
  Pool<Type> pool;
  const torch::Tensor content = pool.by_block().clone();
  std::vector<int64_t*> pointers = pool.pointers();
  constexpr bool kBlockFirst = Type == BackendType::TRTLLM;
  const flexkv::GTensorHandler handler(
      Type, pointers.data(), kLayers, kBlockFirst ? kChunk : kBlocks * kChunk,
      kBlockFirst ? kLayers * kKv * kChunk : kChunk, kBlockFirst ? kKv * kChunk : 0);
  const torch::Tensor layers = at::arange(kLayers, torch::kInt32);
  const torch::Tensor gpu = at::arange(2, 6, torch::kInt64), ssd = at::arange(3, -1, -1, torch::kInt64);
  // In the file, K of all layers precedes V of all layers. No backend's pool has this order, so the transform
  // must move every run.
  const auto move = [&](bool is_read) {
    flexkv::transfer_kv_blocks_gds_staged<Type>(manager, layers, handler, ssd, gpu, kChunk,
                                                kKv * kLayers * kChunk, kLayers * kChunk, kChunk, 0, kBlocks,
                                                kLayers, is_read);
  };
  move(false);
  pool.memory.zero_();
  move(true);
  if (!at::equal(pool.by_block().slice(0, 2, 6), content.slice(0, 2, 6))) return 1;
  pool.by_block().slice(0, 2, 6).zero_();
  if (pool.memory.any().template item<bool>()) return 2;
  if (manager.totals().io_calls != 8 || manager.totals().launches == 0) return 3;
  // The file's blocks must be where the reference implementation puts them.
  torch::Tensor file = torch::empty({4, kKv, kLayers, kChunk}, torch::kUInt8);
  FILE* stored = std::fopen(path.c_str(), "rb");
  const size_t read = std::fread(file.data_ptr(), 1, static_cast<size_t>(file.numel()), stored);
  std::fclose(stored);
  if (read != static_cast<size_t>(file.numel())) return 4;
  if (!at::equal(file.flip(0), content.slice(0, 2, 6).transpose(1, 2))) return 5;
  try {
    transfer_kv_blocks_gds<Type>(manager, gpu, handler, ssd, gpu, kChunk, kKv * kLayers * kChunk,
                                 kLayers * kChunk, kChunk, 0, kBlocks, kLayers, true);
  } catch (const flexkv::GeometryError&) {
    return 0;
  }
  return 6;
}

}  // namespace

// Runs the round trip for the backend with this `gpu_block_type`. A result other than 0 identifies the check
// that failed.
extern "C" int round_trip(const char* path, int backend) {
  switch (backend) {
    case 0:
      return round_trip<BackendType::VLLM>(path);
    case 1:
      return round_trip<BackendType::TRTLLM>(path);
    case 2:
      return round_trip<BackendType::SGLANG>(path);
    default:
      return -1;
  }
}
