// The calls of BlockIndex that read and write data which is stored outside of the entries: which op fills a
// pending block, when a block expires, and which blocks are spare. This file also has `count_ready`.
#include <string>

#include "base/error.h"
#include "index/block_index.h"

namespace flexkv {

size_t BlockIndex::count_ready(std::span<const EntryId> entries) const {
  size_t count = 0;
  while (count < entries.size() && is_known(entries[count]) &&
         table_[entries[count]].state() == EntryState::kReady) {
    ++count;
  }
  return count;
}

size_t BlockIndex::count_ready(uint32_t group, std::span<const BlockKey> keys,
                               std::span<const EntryId> entries) const {
  class_at(group);
  if (keys.size() != entries.size()) {
    throw ContractError("count_ready: " + std::to_string(keys.size()) + " keys and " +
                        std::to_string(entries.size()) + " entries; one entry a key is needed");
  }
  const uint32_t wanted = Entry::pack(EntryState::kReady, group, 0);
  for (size_t i = 0; i < entries.size(); ++i) {
    if (!is_known(entries[i])) return i;
    const Entry& entry = table_[entries[i]];
    const uint64_t differs = (entry.key.low ^ keys[i].low) | (entry.key.high ^ keys[i].high) |
                             ((entry.meta & ~Entry::kMaxPins) ^ wanted);
    if (differs != 0 || entry.pins() == 0) return i;
  }
  return entries.size();
}

void BlockIndex::copy_fillers(std::span<const EntryId> entries, int64_t* out) const {
  for (size_t i = 0; i < entries.size(); ++i) {
    if (!is_known(entries[i])) {
      throw ContractError("fillers: entry " + std::to_string(entries[i]) + " was never in use");
    }
    const bool pending = table_[entries[i]].state() == EntryState::kPending;
    out[i] = pending && fillers_ ? (*fillers_)[entries[i]] : 0;
  }
}

void BlockIndex::set_expiry(std::span<const EntryId> entries, const uint64_t* expiries) {
  bool any = false;
  for (size_t i = 0; i < entries.size(); ++i) {
    if (!is_known(entries[i]) || table_[entries[i]].state() == EntryState::kFree) {
      throw ContractError("set_expiry: entry " + std::to_string(entries[i]) + " is not in use");
    }
    any |= expiries[i] != 0;
  }
  if (!expiries_) {
    if (!any) return;
    expiries_ = std::make_unique<HugeArray<uint64_t>>(table_.size());
  }
  for (size_t i = 0; i < entries.size(); ++i) (*expiries_)[entries[i]] = expiries[i];
}

void BlockIndex::copy_expiries(std::span<const EntryId> entries, uint64_t* out) const {
  for (size_t i = 0; i < entries.size(); ++i) {
    if (!is_known(entries[i])) {
      throw ContractError("expiries: entry " + std::to_string(entries[i]) + " was never in use");
    }
    const bool in_use = table_[entries[i]].state() != EntryState::kFree;
    out[i] = in_use && expiries_ ? (*expiries_)[entries[i]] : 0;
  }
}

void BlockIndex::copy_spare(std::span<const EntryId> entries, uint8_t* out) const {
  for (size_t i = 0; i < entries.size(); ++i) {
    if (!is_known(entries[i])) {
      throw ContractError("spare: entry " + std::to_string(entries[i]) + " was never in use");
    }
    out[i] = table_[entries[i]].state() != EntryState::kFree && is_spare(entries[i]);
  }
}

}  // namespace flexkv
