#include "index/eviction_policy.h"

#include "base/error.h"
#include "index/lru_policy.h"

namespace flexkv {

std::unique_ptr<EvictionPolicy> make_eviction_policy(const std::string& name, EntryId head) {
  if (name == "lru") return std::make_unique<LruPolicy>(head);
  throw ConfigError("eviction policy '" + name + "' is unknown; allowed are: lru");
}

}  // namespace flexkv
