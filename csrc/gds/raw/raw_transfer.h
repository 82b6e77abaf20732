// Transfers described by plain pointers and numbers. The Python functions and the tensor templates call
// these.
#pragma once
#include <cstdint>
#include <span>

#include "base/export.h"
#include "gds/gds_manager.h"
#include "gds/raw/gtensor_handler.h"
#include "gds/raw/raw_layout.h"

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
  bool verbose = false;  // prints to stderr what moved, and by which route
};

// Throws TransferError naming the blocks that failed, and what raw_map() and GDSManager::transfer()
// throw.
FLEXKV_EXPORT void transfer_raw(GDSManager& manager, const RawTransfer& transfer);

// Allocates the part of the manager's own staging that such transfers will use. The given blocks serve as
// examples; none is moved. Throws CapacityError, which says which setting to change, and what raw_map()
// throws.
FLEXKV_EXPORT void reserve_raw_staging(GDSManager& manager, const RawTransfer& transfer);

// Unit: bytes. The size of one block's slot in a staging buffer.
FLEXKV_EXPORT int64_t raw_slot_bytes(const RawTransfer& transfer);

}  // namespace flexkv
