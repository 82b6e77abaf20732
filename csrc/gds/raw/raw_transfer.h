// Transfers described by plain pointers and numbers. The Python functions and the tensor templates call
// these.
#pragma once
#include <cstdint>
#include <span>

#include "base/export.h"
#include "gds/gds_manager.h"
#include "gds/gtensor_handler.h"
#include "gds/page_map.h"

namespace flexkv {

// A transfer between raw files and a pool. The manager's round robin and `blocks_per_file` place the file
// blocks.
struct RawTransfer {
  GTensorHandler pool = {};
  RawBlockLayout file = {};
  std::span<const int32_t> layers = {};
  std::span<const int64_t> file_blocks = {};
  std::span<const int64_t> pool_blocks = {};  // of the same length; pool_blocks[i] <-> file_blocks[i]
  int64_t blocks_per_file = 1;
  bool is_read = true;
  bool staged = true;       // false: one call for each piece of a page, straight to the pool
  void* staging = nullptr;  // null: the manager's own
  int64_t staging_bytes = 0;
  bool verbose = false;  // prints to stderr what moved, and which way
};

// Throws TransferError naming the blocks that failed, and what PageMap::raw() and GDSManager::transfer()
// throw.
FLEXKV_EXPORT void transfer_raw(GDSManager& manager, const RawTransfer& transfer);

// Allocates the part of the manager's own staging that such transfers will use. The given blocks serve as
// examples; none is moved. Throws CapacityError, which says which setting to change, and what PageMap::raw()
// throws.
FLEXKV_EXPORT void reserve_raw_staging(GDSManager& manager, const RawTransfer& transfer);

// Unit: bytes. The size of one block's slot in a staging buffer.
FLEXKV_EXPORT int64_t raw_slot_bytes(const RawTransfer& transfer);

// A copy between a pool and other memory that the pool's device can access. Block b starts at memory + b *
// block_stride and is laid out as `layout` says.
struct RawCopy {
  GTensorHandler pool = {};
  RawBlockLayout layout = {};
  std::span<const int32_t> layers = {};
  std::span<const int64_t> memory_blocks = {};
  std::span<const int64_t> pool_blocks = {};
  void* memory = nullptr;
  int64_t memory_bytes = 0;
  bool to_pool = true;
};

// Returns when every byte has moved. Throws TransferError, GeometryError and BlockRangeError.
FLEXKV_EXPORT void copy_raw(TransformDevice& device, const RawCopy& copy);

}  // namespace flexkv
