// Rejects paths with NUL bytes, which Python allows: a system call would cut the path there and open another
// file.
#pragma once
#include <string>

namespace flexkv {

// Throws E, which names the path, if the path has a NUL byte.
template <typename E>
void require_no_nul(const std::string& path) {
  const size_t at = path.find('\0');
  if (at == std::string::npos) return;
  // The NUL byte itself would end the message.
  throw E("'" + path.substr(0, at) + "\\0...': a path has no NUL byte");
}

}  // namespace flexkv
