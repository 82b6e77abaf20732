#include "index/block_index.h"

#include <numeric>
#include <utility>

#include "base/error.h"

namespace flexkv {
namespace {

const PolicyKind& checked(const PolicyKind& policy) {
  if (policy.lists > 0 && policy.lists <= PolicyKind::kMaxLists) return policy;
  throw ConfigError("eviction policy '" + policy.name + "' needs " + std::to_string(policy.lists) +
                    " lists; allowed are 1 to " + std::to_string(PolicyKind::kMaxLists));
}

// Heads a group needs: the list of leased entries, and the policy's.
size_t heads_per_group(const PolicyKind& policy) { return 1 + policy.lists; }

size_t total_slots(const std::vector<uint32_t>& group_slots) {
  return std::accumulate(group_slots.begin(), group_slots.end(), size_t{0});
}

}  // namespace

BlockIndex::BlockIndex(const std::vector<uint32_t>& group_slots, const PolicyKind& policy, uint64_t seed)
    : policy_lists_(checked(policy).lists),
      policy_follows_(policy.follows),
      table_(heads_per_group(policy) * group_slots.size(), total_slots(group_slots)),
      map_(total_slots(group_slots), seed),
      policy_notes_(policy.notes ? std::make_unique<HugeArray<PolicyNote>>(table_.size()) : nullptr) {
  if (group_slots.empty() || group_slots.size() > kMaxGroups) {
    throw ConfigError("the block index was asked for " + std::to_string(group_slots.size()) +
                      " groups; allowed are 1 to " + std::to_string(kMaxGroups));
  }
  groups_.reserve(group_slots.size());  // each policy refers to its group's pool
  EntryId head = 0;
  for (const uint32_t slots : group_slots) {
    groups_.push_back(Group{SlotPool(slots), head});
    Group& group = groups_.back();
    group.policy = policy.make({table_, head + 1, policy_notes_.get(), group.pool});
    head += static_cast<EntryId>(heads_per_group(policy));
  }
}

BlockIndex::Group& BlockIndex::group_at(uint32_t group) {
  return const_cast<Group&>(std::as_const(*this).group_at(group));
}

const BlockIndex::Group& BlockIndex::group_at(uint32_t group) const {
  if (group < groups_.size()) return groups_[group];
  throw BlockRangeError("group " + std::to_string(group) + "; allowed are 0 to " +
                        std::to_string(groups_.size() - 1));
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
