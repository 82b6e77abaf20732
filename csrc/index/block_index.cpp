#include "index/block_index.h"

#include <utility>

#include "base/error.h"

namespace flexkv {
namespace {

const PolicyKind& checked(const PolicyKind& policy) {
  if (policy.lists > 0 && policy.lists <= PolicyKind::kMaxLists) return policy;
  throw ConfigError("eviction policy '" + policy.name + "' needs " + std::to_string(policy.lists) +
                    " lists; allowed are 1 to " + std::to_string(PolicyKind::kMaxLists));
}

// Returns how many list heads a size class needs: one for the leased entries, one for the spare blocks, and
// one for each list of the policy.
size_t heads_per_class(const PolicyKind& policy) { return 2 + policy.lists; }

// Whether the group has slots of its own, instead of sharing the slots of an earlier group.
bool has_own(const std::vector<uint32_t>& shared_with, size_t group) {
  return group >= shared_with.size() || shared_with[group] == group;
}

size_t total_slots(const std::vector<uint32_t>& group_slots, const std::vector<uint32_t>& shared_with) {
  size_t total = 0;
  for (size_t group = 0; group < group_slots.size(); ++group) {
    if (has_own(shared_with, group)) total += group_slots[group];
  }
  return total;
}

size_t count_classes(const std::vector<uint32_t>& group_slots, const std::vector<uint32_t>& shared_with) {
  size_t count = 0;
  for (size_t group = 0; group < group_slots.size(); ++group) count += has_own(shared_with, group);
  return count;
}

void check_groups(const std::vector<uint32_t>& group_slots, const std::vector<uint32_t>& shared_with) {
  if (group_slots.empty() || group_slots.size() > kMaxGroups) {
    throw ConfigError("the block index was asked for " + std::to_string(group_slots.size()) +
                      " groups; allowed are 1 to " + std::to_string(kMaxGroups));
  }
  if (!shared_with.empty() && shared_with.size() != group_slots.size()) {
    throw ConfigError("the block index was told of " + std::to_string(shared_with.size()) +
                      " groups whose slots they share; it has " + std::to_string(group_slots.size()));
  }
  for (size_t group = 0; group < shared_with.size(); ++group) {
    const size_t other = shared_with[group];
    if (other <= group && shared_with[other] == other && group_slots[other] == group_slots[group]) continue;
    throw ConfigError("group " + std::to_string(group) + " with " + std::to_string(group_slots[group]) +
                      " slots is to share those of group " + std::to_string(other) +
                      "; allowed is itself, or one before it that has as many slots, all its own");
  }
}

}  // namespace

BlockIndex::BlockIndex(const std::vector<uint32_t>& group_slots, const PolicyKind& policy, uint64_t seed,
                       const std::vector<uint32_t>& shared_with)
    : policy_lists_(checked(policy).lists),
      policy_follows_(policy.follows),
      table_(heads_per_class(policy) * count_classes(group_slots, shared_with),
             total_slots(group_slots, shared_with)),
      map_(total_slots(group_slots, shared_with), seed),
      policy_notes_(policy.notes ? std::make_unique<HugeArray<PolicyNote>>(table_.size()) : nullptr) {
  check_groups(group_slots, shared_with);
  // Avoids reallocation, because each policy refers to its class's pool.
  classes_.reserve(group_slots.size());
  EntryId head = 0;
  for (size_t group = 0; group < group_slots.size(); ++group) {
    if (!has_own(shared_with, group)) {
      class_of_.push_back(class_of_[shared_with[group]]);
      shares_ = true;
      continue;
    }
    class_of_.push_back(static_cast<uint32_t>(classes_.size()));
    classes_.push_back(SizeClass{SlotPool(group_slots[group]), head, head + 1});
    SizeClass& made = classes_.back();
    made.policy = policy.make({table_, head + 2, policy_notes_.get(), made.pool});
    head += static_cast<EntryId>(heads_per_class(policy));
  }
}

BlockIndex::SizeClass& BlockIndex::class_at(uint32_t group) {
  return const_cast<SizeClass&>(std::as_const(*this).class_at(group));
}

const BlockIndex::SizeClass& BlockIndex::class_at(uint32_t group) const {
  if (group < class_of_.size()) return classes_[class_of_[group]];
  throw BlockRangeError("group " + std::to_string(group) + "; allowed are 0 to " +
                        std::to_string(class_of_.size() - 1));
}

void BlockIndex::ready(std::span<const EntryId> entries, uint8_t* ready) const {
  for (size_t i = 0; i < entries.size(); ++i) {
    ready[i] = entries[i] >= table_.first() && entries[i] < table_.end() &&
               table_[entries[i]].state() == EntryState::kReady;
  }
}

void BlockIndex::copy_keys(std::span<const EntryId> entries, uint8_t* out) const {
  for (size_t i = 0; i < entries.size(); ++i) {
    if (entries[i] < table_.first() || entries[i] >= table_.end()) {
      throw ContractError("copy_keys: entry " + std::to_string(entries[i]) + " was never in use");
    }
    std::memcpy(out + i * kKeyBytes, &table_[entries[i]].key, kKeyBytes);
  }
}

}  // namespace flexkv
