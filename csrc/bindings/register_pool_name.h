// Converts the value of the setting `register_pool` to a RegisterPool.
#pragma once
#include <string>

#include "base/error.h"
#include "gds/pool_registration.h"

namespace flexkv {

// Throws ConfigError if the name is unknown.
inline RegisterPool to_register_pool(const std::string& name) {
  if (name == "off") return RegisterPool::kOff;
  if (name == "auto") return RegisterPool::kAuto;
  if (name == "on") return RegisterPool::kOn;
  throw ConfigError("register_pool='" + name + "': allowed are 'off', 'auto' and 'on'");
}

}  // namespace flexkv
