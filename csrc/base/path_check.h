// Rejects paths with NUL bytes. A Python string may contain them, but a system call would cut the path at the
// first NUL byte and open a different file.
#pragma once
#include <string>

namespace flexkv {

// Throws E if the path has a NUL byte. The message quotes the path up to that byte.
template <typename E>
void require_no_nul(const std::string& path) {
  const size_t at = path.find('\0');
  if (at == std::string::npos) return;
  // A NUL byte in the message would cut off the rest of the message, so the byte is shown as the two
  // characters \0.
  throw E("'" + path.substr(0, at) + "\\0...': a path has no NUL byte");
}

}  // namespace flexkv
