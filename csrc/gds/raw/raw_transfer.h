// Transfers on raw files, described by plain pointers and numbers. The bindings for Python and the templates
// of tensor_transfer.h call these functions.
#pragma once
#include <cstdint>
#include <span>

#include "base/export.h"
#include "gds/gds_manager.h"
#include "gds/raw/gtensor_handler.h"
#include "gds/raw/raw_layout.h"

namespace flexkv {

// A transfer between raw files and a pool. The manager's option round_robin and `blocks_per_file` determine
// where a block lies in the files.
struct RawTransfer {
  GTensorHandler pool = {};
  RawBlockLayout file = {};
  std::span<const int32_t> layers = {};
  std::span<const int64_t> file_blocks = {};
  // Block pool_blocks[i] of the pool is copied from or to block file_blocks[i] of the files.
  std::span<const int64_t> pool_blocks = {};
  int64_t blocks_per_file = 1;
  bool is_read = true;
  bool staged = true;       // if false, each piece of a page is moved directly, in one call
  void* staging = nullptr;  // the caller's staging buffer; null to use the manager's own
  int64_t staging_bytes = 0;
  bool verbose = false;  // whether to print to stderr how many bytes were moved, and by which route
};

// Performs the transfer. Throws TransferError if blocks failed; the message lists these blocks. Also throws
// what raw_map() and GDSManager::transfer() throw.
FLEXKV_EXPORT void transfer_raw(GDSManager& manager, const RawTransfer& transfer);

// Allocates the manager's own staging for transfers like this one. The blocks of `transfer` serve as examples
// and are not moved. Throws CapacityError, whose text says which setting to change, and what raw_map()
// throws.
FLEXKV_EXPORT void reserve_raw_staging(GDSManager& manager, const RawTransfer& transfer);

// Returns the size of the staging slot that one block needs, in bytes.
FLEXKV_EXPORT int64_t raw_slot_bytes(const RawTransfer& transfer);

}  // namespace flexkv
