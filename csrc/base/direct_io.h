// Checks whether direct I/O works on 4 KiB boundaries.
#pragma once
#include <string>

namespace flexkv {

// Why direct I/O on `fd` needs a larger alignment than kIoAlignBytes. Empty if it does not, or if the kernel
// does not report it: on such kernels that alignment is usually enough.
std::string direct_io_refusal(int fd);

}  // namespace flexkv
