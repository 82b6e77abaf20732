// What direct I/O of a disk takes.
#pragma once
#include <string>

namespace flexkv {

// Why direct I/O on `fd` does not take boundaries of kIoAlignBytes; empty where it does, or the kernel does
// not say, which then are enough as a rule.
std::string direct_io_refusal(int fd);

}  // namespace flexkv
