// Which block goes when a slot is needed. One policy object serves one group. A block that is leased stays in
// the policy's lists until it is named as a victim: the index then takes it out, and admits it again when its
// last lease ends.
#pragma once
#include <memory>
#include <string>

#include "index/entry_table.h"

namespace flexkv {

class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;

  // How many list heads of the entry table this policy needs.
  static constexpr size_t kHeads = 1;

  // An unlinked chain first..last, in the order of its request, becomes evictable: it was just used. The
  // policy links it into one of its lists. The index unlinks entries itself when they are evicted or removed,
  // or when their lease ends.
  virtual void admit(EntryTable& table, EntryId first, EntryId last) = 0;

  // The entry to evict next, or kNoEntry. O(1). Does not unlink it.
  virtual EntryId victim(const EntryTable& table) const = 0;

  // For integrity checks: the list this policy keeps.
  virtual EntryId head() const = 0;
};

// Makes the policy called `name` over the list head `head`. Throws ConfigError for an unknown name.
std::unique_ptr<EvictionPolicy> make_eviction_policy(const std::string& name, EntryId head);

}  // namespace flexkv
