#include "base/direct_io.h"

#include <fcntl.h>
#include <sys/stat.h>

#include "base/align.h"

namespace flexkv {

std::string direct_io_refusal([[maybe_unused]] int fd) {
#ifdef STATX_DIOALIGN
  struct statx info{};
  if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) != 0) return {};
  const uint32_t offset = info.stx_dio_offset_align, memory = info.stx_dio_mem_align;
  if ((info.stx_mask & STATX_DIOALIGN) == 0 || offset == 0) return {};
  if (memory != 0 && kIoAlignBytes % offset == 0 && kIoAlignBytes % memory == 0) return {};
  return "direct I/O needs offsets on " + std::to_string(offset) + " and memory on " +
         std::to_string(memory) + " bytes; pages lie on multiples of " + std::to_string(kIoAlignBytes);
#else
  return {};
#endif
}

}  // namespace flexkv
