// Describes an inference engine's pool by the addresses and strides of its tensors. Callers from outside
// flexkv use this form.
#pragma once
#include <cstdint>

#include "base/host_device.h"

namespace flexkv {

// The inference engine's layout of its pool. The values are those of the Python argument `gpu_block_type`.
enum class BackendType : int32_t {
  VLLM = 0,    // one tensor per layer: [kv][block][data], or [block][kv][data]
  TRTLLM = 1,  // one tensor: [block][layer][kv][data]
  SGLANG = 2,  // K of every layer, then V of every layer, one tensor each: [block][data]
};

// `gpu_tensor_ptrs` is an array of addresses in host memory. It has num_layers addresses for VLLM and one
// address for TRTLLM. For SGLANG it has num_layers addresses of K, then num_layers addresses of V. The
// handler owns neither the array nor the tensors.
struct GTensorHandler {
  BackendType type = BackendType::VLLM;
  int64_t** gpu_tensor_ptrs = nullptr;
  int64_t num_layers = 0;
  int64_t gpu_kv_stride_in_bytes = 0;
  int64_t gpu_block_stride_in_bytes = 0;
  int64_t gpu_layer_stride_in_bytes = 0;

  GTensorHandler() = default;
  GTensorHandler(BackendType type_, int64_t** gpu_tensor_ptrs_, int64_t num_layers_,
                 int64_t kv_stride_in_bytes, int64_t block_stride_in_bytes, int64_t layer_stride_in_bytes)
      : type(type_),
        gpu_tensor_ptrs(gpu_tensor_ptrs_),
        num_layers(num_layers_),
        gpu_kv_stride_in_bytes(kv_stride_in_bytes),
        gpu_block_stride_in_bytes(block_stride_in_bytes),
        gpu_layer_stride_in_bytes(layer_stride_in_bytes) {}

  // The number of addresses in gpu_tensor_ptrs. `kv_dim` is 2, or 1 for a pool with one tensor for both K and
  // V (MLA).
  int64_t num_tensors(int32_t kv_dim) const {
    return type == BackendType::TRTLLM ? 1 : type == BackendType::VLLM ? num_layers : num_layers * kv_dim;
  }
  // Returns the address at which block 0's run of K (kv 0) or V (kv 1) begins in a layer. Precondition: 0 <=
  // layer < num_layers.
  uintptr_t first_run(int64_t layer, int64_t kv) const {
    const auto tensor = [&](int64_t i) { return reinterpret_cast<uintptr_t>(gpu_tensor_ptrs[i]); };
    const auto bytes = [](int64_t offset) { return static_cast<uintptr_t>(offset); };
    if (type == BackendType::SGLANG) return tensor(kv * num_layers + layer);
    if (type == BackendType::VLLM) return tensor(layer) + bytes(kv * gpu_kv_stride_in_bytes);
    return tensor(0) + bytes(layer * gpu_layer_stride_in_bytes + kv * gpu_kv_stride_in_bytes);
  }
};

}  // namespace flexkv
