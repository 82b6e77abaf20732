// A library to preload into a process. It makes the process see a disk whose direct I/O needs
// boundaries other than 4 KiB. For files with DIO_PATH in their path, it reports that direct I/O needs file
// offsets that are multiples of DIO_OFFSET bytes, and memory on boundaries of DIO_MEMORY bytes.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

extern "C" int statx(int fd, const char* path, int flags, unsigned mask, struct statx* info) noexcept {
  const int done = static_cast<int>(syscall(SYS_statx, fd, path, flags, mask, info));
#ifdef STATX_DIOALIGN
  char link[64], of[4096] = {};
  snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
  const char* wanted = getenv("DIO_PATH");
  if (done == 0 && (mask & STATX_DIOALIGN) != 0 && wanted != nullptr &&
      readlink(link, of, sizeof(of) - 1) > 0 && strstr(of, wanted) != nullptr) {
    info->stx_mask |= STATX_DIOALIGN;
    info->stx_dio_offset_align = static_cast<unsigned>(atoi(getenv("DIO_OFFSET")));
    info->stx_dio_mem_align = static_cast<unsigned>(atoi(getenv("DIO_MEMORY")));
  }
#endif
  return done;
}
