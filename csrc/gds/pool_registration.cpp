#include "gds/pool_registration.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/align.h"

namespace flexkv {
namespace {

// Unit: bytes. A GPU's memory is pinned in pages of this size (nvidia_p2p_get_pages).
constexpr int64_t kGpuPageBytes = int64_t{64} << 10;

std::string of_bytes(int64_t bytes) { return std::to_string(bytes) + " bytes"; }

bool overlap(const PoolRegion& a, const PoolRegion& b) {
  return a.base < b.base + static_cast<uintptr_t>(b.bytes()) &&
         b.base < a.base + static_cast<uintptr_t>(a.bytes());
}

}  // namespace

std::vector<MemoryPiece> pool_pieces(const PoolRegion& region, int64_t most_bytes) {
  std::vector<MemoryPiece> pieces;
  if (region.blocks < 1) return pieces;
  int64_t at_once = std::max<int64_t>(1, most_bytes / region.block_stride);
  const int64_t aligned = kGpuPageBytes / std::gcd(region.block_stride, kGpuPageBytes);
  if (at_once >= aligned) at_once = at_once / aligned * aligned;
  for (int64_t first = 0; first < region.blocks; first += at_once) {
    const int64_t blocks = std::min(at_once, region.blocks - first);
    const int64_t bytes = (blocks - 1) * region.block_stride + region.block_bytes;
    pieces.push_back({region.base + static_cast<uintptr_t>(first * region.block_stride), bytes});
  }
  return pieces;
}

std::string PoolRegistrations::refusal_of(const PoolRegion& region, const Registering& needs) const {
  if (mode_ == RegisterPool::kOff) return "gds.register_pool is off";
  if (!needs.refusal.empty()) return needs.refusal;
  const auto on_boundary = [](int64_t value) { return value % kIoAlignBytes == 0; };
  if (!on_boundary(static_cast<int64_t>(region.base)) || !on_boundary(region.block_stride) ||
      !on_boundary(region.block_bytes)) {
    return "its blocks of " + of_bytes(region.block_bytes) + ", one every " + of_bytes(region.block_stride) +
           " from address " + std::to_string(region.base) + ", do not lie on 4 KiB boundaries";
  }
  if (needs.most_bytes && region.bytes() > *needs.most_bytes) {
    return "it has " + of_bytes(region.bytes()) + ", and cuFile pins " + of_bytes(*needs.most_bytes) +
           " more at most (max_device_pinned_mem_size_kb)";
  }
  const int64_t window = device_->window_bytes();
  if (window > 0 && region.bytes() > window) {
    return "it has " + of_bytes(region.bytes()) + ", and the GPU's BAR1 window for disks has " +
           of_bytes(window);
  }
  return {};
}

void PoolRegistrations::add(const PoolRegion& region, const std::function<void()>& look) {
  const auto same = [&](const Entry& entry) { return entry.region == region; };
  if (!io_.registering().needed || std::any_of(entries_.begin(), entries_.end(), same)) return;
  Entry entry{region, Way::kRefused, {}, {}};
  const auto shares = [&](const Entry& other) { return overlap(other.region, region); };
  if (std::any_of(entries_.begin(), entries_.end(), shares)) {
    entry.refusal = "two KV groups share its memory in different blocks";
  } else {
    entry.refusal = refusal_of(region, io_.registering());
    if (entry.refusal.empty()) {
      if (!io_.registering().seen_direct) look();
      try_to_register(entry);
    }
  }
  entries_.push_back(std::move(entry));
}

void PoolRegistrations::refuse(std::string reason) {
  if (!io_.registering().needed) return;
  if (mode_ == RegisterPool::kOff) reason = "gds.register_pool is off";
  entries_.push_back({{}, Way::kRefused, {}, std::move(reason)});
}

void PoolRegistrations::try_to_register(Entry& entry) {
  const Registering needs = io_.registering();
  entry.refusal = refusal_of(entry.region, needs);
  entry.way = Way::kRefused;
  if (!entry.refusal.empty()) return;
  if (mode_ == RegisterPool::kAuto && !needs.seen_direct) {
    entry.way = Way::kUnseen;
    entry.refusal = "no call has been seen to go straight: " + io_.name();
    return;
  }
  entry.refusal = register_pieces(entry);
  if (entry.refusal.empty()) entry.way = Way::kRegistered;
}

std::string PoolRegistrations::register_pieces(Entry& entry) {
  // The device must be current, because cuFile registers memory with the current context, and this may be a
  // thread of the inference engine with another device.
  return device_->while_current([&] {
    const std::vector<MemoryPiece> wanted = pool_pieces(entry.region, piece_bytes_);
    for (const MemoryPiece& piece : wanted) {
      auto* memory = reinterpret_cast<void*>(piece.base);
      const std::string error = io_.add_memory(memory, piece.bytes);
      if (!error.empty()) {
        // Makes the I/O object forget this refusal, which must not affect the staging.
        io_.remove_memory(memory);
        const std::string made = std::to_string(entry.pieces.size());
        deregister(entry.pieces);
        return "after " + made + " of " + std::to_string(wanted.size()) + " pieces: " + error;
      }
      entry.pieces.push_back(piece);
      registered_ += 1;
    }
    return std::string();
  });
}

// Deregisters all of `pieces` and empties the list. Precondition: the device is current.
void PoolRegistrations::deregister(std::vector<MemoryPiece>& pieces) {
  for (const MemoryPiece& piece : pieces) {
    io_.remove_memory(reinterpret_cast<void*>(piece.base));
    released_ += 1;
  }
  pieces.clear();
}

void PoolRegistrations::release() {
  for (Entry& entry : entries_) {
    if (entry.way != Way::kRegistered) continue;
    device_->while_current([&] {
      deregister(entry.pieces);
      return std::string();
    });
    entry.way = Way::kReleased;
  }
}

void PoolRegistrations::restore() {
  for (Entry& entry : entries_) {
    if (entry.way == Way::kReleased) try_to_register(entry);
  }
}

bool PoolRegistrations::waits() const {
  const auto any = [&](Way way) {
    return std::any_of(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.way == way; });
  };
  return any(Way::kReleased) || (any(Way::kUnseen) && io_.registering().seen_direct);
}

void PoolRegistrations::retry() {
  for (Entry& entry : entries_) {
    if (entry.way == Way::kUnseen) try_to_register(entry);
  }
}

PoolState PoolRegistrations::state() const {
  PoolState found;
  found.registered = registered_;
  found.released = released_;
  for (const Entry& entry : entries_) {
    if (entry.way == Way::kRegistered) found.regions += 1;
    found.pieces += static_cast<int64_t>(entry.pieces.size());
    for (const MemoryPiece& piece : entry.pieces) found.bytes += piece.bytes;
    if (found.refusal.empty()) found.refusal = entry.refusal;
  }
  return found;
}

}  // namespace flexkv
