#include "index/eviction/eviction_policy.h"

#include <array>

#include "base/error.h"
#include "index/eviction/bonus_lru.h"
#include "index/eviction/lru.h"

namespace flexkv {

std::span<const PolicyKind> policy_kinds() {
  static const std::array kinds = {
      lru_kind(),
      bonus_lru_kind(),
  };
  return kinds;
}

const PolicyKind& policy_kind(const std::string& name) {
  std::string allowed;
  for (const PolicyKind& kind : policy_kinds()) {
    if (kind.name == name) return kind;
    allowed += (allowed.empty() ? "" : ", ") + kind.name;
  }
  throw ConfigError("eviction policy '" + name + "' is unknown; allowed are: " + allowed);
}

}  // namespace flexkv
