// Transfers on raw files that take tensors, for C++ callers that have libtorch. The templates are compiled as
// part of the caller's code, and pass only pointers and numbers to flexkv. The caller includes torch's own
// header before this one. Instead of a torch tensor, the caller may also pass an object of any other type
// that has the members required by HostTensor.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>

#include "base/error.h"
#include "gds/raw/raw_transfer.h"

namespace flexkv {

template <typename T>
concept HostTensor = requires(const T& tensor) {
  { tensor.data_ptr() } -> std::convertible_to<const void*>;
  { tensor.numel() } -> std::convertible_to<int64_t>;
  { tensor.element_size() } -> std::convertible_to<size_t>;
  { tensor.is_contiguous() } -> std::convertible_to<bool>;
  { tensor.is_cpu() } -> std::convertible_to<bool>;
};

namespace tensor_detail {

template <typename Id, HostTensor Tensor>
std::span<const Id> ids(const Tensor& tensor, const char* name) {
  if (!tensor.is_cpu() || !tensor.is_contiguous() ||
      static_cast<size_t>(tensor.element_size()) != sizeof(Id)) {
    throw GeometryError(std::string(name) + ": a contiguous tensor of int" + std::to_string(8 * sizeof(Id)) +
                        " in host memory is needed");
  }
  return {static_cast<const Id*>(tensor.data_ptr()), static_cast<size_t>(tensor.numel())};
}

template <BackendType Type, HostTensor Tensor>
RawTransfer describe(const Tensor& gpu_layer_id_list, GTensorHandler gpu_tensor_handler,
                     const Tensor& ssd_block_ids, const Tensor& gpu_block_ids,
                     int64_t ssd_layer_stride_in_bytes, int64_t ssd_block_stride_in_bytes,
                     int64_t ssd_kv_stride_in_bytes, int64_t chunk_size_in_bytes,
                     int64_t ssd_copy_off_inside_chunks, int num_blocks_per_file, int64_t total_layers,
                     bool is_read, bool verbose, bool is_mla) {
  if (gpu_tensor_handler.type != Type) {
    throw GeometryError("gpu_tensor_handler is of backend type " +
                        std::to_string(static_cast<int>(gpu_tensor_handler.type)) + ", the function of " +
                        std::to_string(static_cast<int>(Type)));
  }
  RawTransfer transfer;
  transfer.pool = gpu_tensor_handler;
  transfer.file = {.layer_stride = ssd_layer_stride_in_bytes,
                   .kv_stride = ssd_kv_stride_in_bytes,
                   .block_stride = ssd_block_stride_in_bytes,
                   .copy_offset = ssd_copy_off_inside_chunks,
                   .chunk_bytes = chunk_size_in_bytes,
                   .kv_dim = is_mla ? 1 : 2,
                   .total_layers = total_layers};
  transfer.layers = ids<int32_t>(gpu_layer_id_list, "gpu_layer_id_list");
  transfer.file_blocks = ids<int64_t>(ssd_block_ids, "ssd_block_ids");
  transfer.pool_blocks = ids<int64_t>(gpu_block_ids, "gpu_block_ids");
  transfer.blocks_per_file = num_blocks_per_file;
  transfer.is_read = is_read;
  transfer.verbose = verbose;
  return transfer;
}

}  // namespace tensor_detail

// Moves blocks between raw files and a pool through staging slots (docs/gds.md), and returns when all bytes
// have been moved. `gpu_layer_id_list` is int32 and the block ids are int64; these tensors are all in host
// memory. `staging_buffer` is memory on the pool's device and begins on a 4 KiB boundary. Its size is
// raw_slot_bytes() times the number of blocks that are moved, or times the manager's max_staging_blocks if
// that is less. If it is null, the manager's own staging is used. Throws what transfer_raw() throws.
template <BackendType Type, HostTensor Tensor>
void transfer_kv_blocks_gds_staged(GDSManager& gds_manager, const Tensor& gpu_layer_id_list,
                                   GTensorHandler gpu_tensor_handler, const Tensor& ssd_block_ids,
                                   const Tensor& gpu_block_ids, int64_t ssd_layer_stride_in_bytes,
                                   int64_t ssd_block_stride_in_bytes, int64_t ssd_kv_stride_in_bytes,
                                   int64_t chunk_size_in_bytes, int64_t ssd_copy_off_inside_chunks,
                                   int num_blocks_per_file, int64_t total_layers, bool is_read,
                                   void* staging_buffer = nullptr, bool verbose = false,
                                   bool is_mla = false) {
  RawTransfer transfer = tensor_detail::describe<Type>(
      gpu_layer_id_list, gpu_tensor_handler, ssd_block_ids, gpu_block_ids, ssd_layer_stride_in_bytes,
      ssd_block_stride_in_bytes, ssd_kv_stride_in_bytes, chunk_size_in_bytes, ssd_copy_off_inside_chunks,
      num_blocks_per_file, total_layers, is_read, verbose, is_mla);
  if (staging_buffer != nullptr) {
    const auto blocks = std::min<int64_t>(static_cast<int64_t>(transfer.pool_blocks.size()),
                                          gds_manager.options().max_staging_blocks);
    transfer.staging = staging_buffer;
    transfer.staging_bytes = std::max<int64_t>(blocks, 1) * raw_slot_bytes(transfer);
  }
  transfer_raw(gds_manager, transfer);
}

// Does what transfer_kv_blocks_gds_staged() does, but without staging: it makes one I/O call for each part of
// a block that is contiguous in the pool and in the file.
template <BackendType Type, HostTensor Tensor>
void transfer_kv_blocks_gds(GDSManager& gds_manager, const Tensor& gpu_layer_id_list,
                            GTensorHandler gpu_tensor_handler, const Tensor& ssd_block_ids,
                            const Tensor& gpu_block_ids, int64_t ssd_layer_stride_in_bytes,
                            int64_t ssd_block_stride_in_bytes, int64_t ssd_kv_stride_in_bytes,
                            int64_t chunk_size_in_bytes, int64_t ssd_copy_off_inside_chunks,
                            int num_blocks_per_file, int64_t total_layers, bool is_read, bool verbose = false,
                            bool is_mla = false) {
  RawTransfer transfer = tensor_detail::describe<Type>(
      gpu_layer_id_list, gpu_tensor_handler, ssd_block_ids, gpu_block_ids, ssd_layer_stride_in_bytes,
      ssd_block_stride_in_bytes, ssd_kv_stride_in_bytes, chunk_size_in_bytes, ssd_copy_off_inside_chunks,
      num_blocks_per_file, total_layers, is_read, verbose, is_mla);
  transfer.staged = false;
  transfer_raw(gds_manager, transfer);
}

}  // namespace flexkv
