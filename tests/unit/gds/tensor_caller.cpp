// A caller of the template with libtorch's tensors, in a library of its own.
#include <torch/types.h>

#include <string>
#include <vector>

#include "gds/io_choice.h"
#include "gds/tensor_transfer.h"

// Stores and loads blocks of a layer-first pool; 0 if every byte came back and no other changed.
extern "C" int round_trip(const char* path) {
  using flexkv::BackendType;
  constexpr int64_t kLayers = 4, kBlocks = 8, kChunk = 1024;
  flexkv::GDSManager manager({{std::string(path)}}, {}, flexkv::choose_device(flexkv::kHostDevice, 0),
                             &flexkv::choose_io);
  torch::Tensor pool = at::randint(0, 256, {kLayers, 2, kBlocks, kChunk}, torch::kUInt8);
  const torch::Tensor content = pool.clone();
  std::vector<int64_t*> pointers;
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    pointers.push_back(static_cast<int64_t*>(pool[layer].data_ptr()));
  }
  const flexkv::GTensorHandler handler(BackendType::VLLM, pointers.data(), kLayers, kBlocks * kChunk, kChunk,
                                       0);
  const torch::Tensor layers = at::arange(kLayers, torch::kInt32);
  const torch::Tensor gpu = at::arange(2, 6, torch::kInt64), ssd = at::arange(3, -1, -1, torch::kInt64);
  const auto move = [&](bool is_read) {
    flexkv::transfer_kv_blocks_gds_staged<BackendType::VLLM>(manager, layers, handler, ssd, gpu, 2 * kChunk,
                                                             2 * kChunk * kLayers, kChunk, kChunk, 0, kBlocks,
                                                             kLayers, is_read);
  };
  move(false);
  pool.zero_();
  move(true);
  const auto moved = at::indexing::Slice(2, 6);
  if (!at::equal(pool.index({"...", moved, at::indexing::Slice()}),
                 content.index({"...", moved, at::indexing::Slice()}))) {
    return 1;
  }
  pool.index_put_({"...", moved, at::indexing::Slice()}, 0);
  if (pool.any().item<bool>()) return 2;
  try {
    transfer_kv_blocks_gds<BackendType::VLLM>(manager, gpu, handler, ssd, gpu, 2 * kChunk,
                                              2 * kChunk * kLayers, kChunk, kChunk, 0, kBlocks, kLayers,
                                              true);
  } catch (const flexkv::GeometryError&) {
    return manager.totals().io_calls == 8 ? 0 : 3;
  }
  return 4;
}
