// What direct I/O on a disk requires.
#pragma once
#include <string>

namespace flexkv {

// Why direct I/O on `fd` does not take boundaries of kIoAlignBytes; empty if it does, or if the kernel does
// not say: then they are enough as a rule.
std::string direct_io_refusal(int fd);

}  // namespace flexkv
