// Converts the name of an I/O backend in the settings to an IoBackend.
#pragma once
#include <string>

#include "base/error.h"
#include "io/io_queue.h"

namespace flexkv {

// Throws ConfigError if the name is unknown.
inline IoBackend to_io_backend(const std::string& name) {
  if (name == "auto") return IoBackend::kAuto;
  if (name == "uring") return IoBackend::kUring;
  if (name == "threads") return IoBackend::kThreads;
  throw ConfigError("io='" + name + "': allowed are 'auto', 'uring' and 'threads'");
}

}  // namespace flexkv
