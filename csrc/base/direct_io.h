// Checks whether a 4 KiB alignment is enough for direct I/O on a file.
#pragma once
#include <string>

namespace flexkv {

// Returns why direct I/O on `fd` needs a larger alignment than kIoAlignBytes. Returns an empty string if
// kIoAlignBytes is enough, or if the kernel does not report the alignment: in that case, kIoAlignBytes is
// usually enough.
std::string direct_io_refusal(int fd);

}  // namespace flexkv
