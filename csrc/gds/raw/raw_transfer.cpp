#include "gds/raw/raw_transfer.h"

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "base/error.h"
#include "gds/raw/raw_file.h"
#include "layout/overlap.h"

namespace flexkv {
namespace {

// The maximum number of failed blocks that an error message lists.
constexpr size_t kNamedFailures = 8;
// Unit: bytes. A block's end in a pool or a file must be below this limit, so that sums are far from
// overflow.
constexpr int64_t kMostBytes = int64_t{1} << 56;

// Throws BlockRangeError if the block is negative or so large that the block would lie beyond kMostBytes.
void check_reach(int64_t block, int64_t stride, const char* what) {
  if (block < 0) {
    throw BlockRangeError("block " + std::to_string(block) + " of " + what + ": must not be negative");
  }
  if (block < kMostBytes / stride) return;
  throw BlockRangeError("block " + std::to_string(block) + " of " + what + ", " + std::to_string(stride) +
                        " bytes each: allowed are [0, " + std::to_string(kMostBytes / stride) + ")");
}

void check_blocks(const PageMap& map, std::span<const int64_t> pool_blocks,
                  std::span<const int64_t> file_blocks) {
  if (pool_blocks.size() != file_blocks.size()) {
    throw GeometryError(std::to_string(pool_blocks.size()) + " blocks of the pool and " +
                        std::to_string(file_blocks.size()) + " of the files: as many are needed");
  }
  if (pool_blocks.empty()) return;
  const auto [lowest, highest] = std::minmax_element(pool_blocks.begin(), pool_blocks.end());
  for (const int64_t block : {*lowest, *highest}) {
    check_reach(block, map.segments().front().block_stride, "the pool");
  }
  check_no_overlap(map.segments(), *highest + 1);
}

// Throws GeometryError if a run of the pool block with the highest number lies in memory that the device
// cannot access. This has to be checked because callers pass addresses and strides, but no sizes.
void check_pool(const TransformDevice& device, const PageMap& map, std::span<const int64_t> pool_blocks) {
  if (pool_blocks.empty()) return;
  const int64_t highest = *std::max_element(pool_blocks.begin(), pool_blocks.end());
  for (const Segment& run : map.segments()) {
    const int64_t bytes = highest * run.block_stride + run.run_bytes;
    const std::string why = device.cannot_reach(reinterpret_cast<const void*>(run.base), bytes);
    if (why.empty()) continue;
    throw GeometryError("block " + std::to_string(highest) + " of the pool, with a stride of " +
                        std::to_string(run.block_stride) + " bytes, ends " + std::to_string(bytes) +
                        " bytes behind the address of layer " + std::to_string(run.layer) + ": " + why);
  }
}

std::vector<StagedPage> pages_of(const GDSManager& manager, const RawTransfer& transfer) {
  const RawFileRule rule(manager.devices(), manager.options().round_robin, transfer.blocks_per_file);
  std::vector<StagedPage> pages;
  pages.reserve(transfer.file_blocks.size());
  for (size_t i = 0; i < transfer.file_blocks.size(); ++i) {
    const BlockPlace place = rule.place(transfer.file_blocks[i]);
    check_reach(place.block_in_file, transfer.file.block_stride, "its file");
    pages.push_back({transfer.pool_blocks[i], place.device, place.file,
                     place.block_in_file * transfer.file.block_stride});
  }
  return pages;
}

std::string describe_failures(const TransferReport& report, const RawTransfer& transfer) {
  std::string text = std::to_string(report.failures.size()) + " of " + std::to_string(report.pages) +
                     (transfer.is_read ? " blocks were not read" : " blocks were not written");
  for (size_t i = 0; i < std::min(report.failures.size(), kNamedFailures); ++i) {
    const PageFailure& failure = report.failures[i];
    const auto at = static_cast<size_t>(failure.position);
    text += "; block " + std::to_string(transfer.pool_blocks[at]) + " (block " +
            std::to_string(transfer.file_blocks[at]) + " of the files): " + failure.reason;
  }
  if (report.failures.size() > kNamedFailures) text += "; ...";
  return text;
}

}  // namespace

int64_t raw_slot_bytes(const RawTransfer& transfer) {
  return raw_map(transfer.pool, transfer.file, transfer.layers).slot_bytes();
}

void reserve_raw_staging(GDSManager& manager, const RawTransfer& transfer) {
  const PageMap map = raw_map(transfer.pool, transfer.file, transfer.layers);
  if (transfer.pool_blocks.size() != transfer.file_blocks.size()) {
    throw GeometryError("as many blocks of the pool as of the files are needed");
  }
  std::vector<StagedPage> samples = pages_of(manager, transfer);
  std::erase_if(samples, [&](const StagedPage& page) { return !manager.has_file(page.device, page.file); });
  manager.reserve_staging(map, samples, !transfer.staged);
}

void transfer_raw(GDSManager& manager, const RawTransfer& transfer) {
  const PageMap map = raw_map(transfer.pool, transfer.file, transfer.layers);
  check_blocks(map, transfer.pool_blocks, transfer.file_blocks);
  check_pool(manager.device(), map, transfer.pool_blocks);
  std::shared_ptr<StagingBuffer> staging;
  if (transfer.staging != nullptr && transfer.staged && manager.options().use_staged_transfer) {
    staging = std::make_shared<StagingBuffer>(transfer.staging, transfer.staging_bytes);
    staging->slots_of(map.slot_bytes());  // throws if the buffer is too small, even if no slot will be used
  }
  const TransferReport report = manager.transfer(map, pages_of(manager, transfer), transfer.is_read,
                                                 std::move(staging), !transfer.staged);
  if (transfer.verbose) {
    std::fprintf(stderr,
                 "flexkv: %s %lld blocks, %lld bytes, %s: %lld I/O calls (%lld bounced), %lld launches; %s\n",
                 transfer.is_read ? "read" : "wrote", static_cast<long long>(report.pages),
                 static_cast<long long>(report.io_bytes), report.staged ? "staged" : "direct",
                 static_cast<long long>(report.io_calls), static_cast<long long>(report.bounced_calls),
                 static_cast<long long>(report.launches), manager.describe().c_str());
  }
  if (!report.ok()) throw TransferError(describe_failures(report, transfer));
}

}  // namespace flexkv
