// A library to preload into a process. It simulates a disk that hangs: `pwrite` never returns in the thread
// whose name is in HANG_THREAD. The disk tier uses `pwrite` to clear an idle disk with zeros. It reads and
// writes pages with other calls, which do not hang.
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

namespace {

ssize_t write_or_hang(int fd, const void* data, size_t bytes, off_t offset) {
  const char* named = getenv("HANG_THREAD");
  char name[16] = {};
  pthread_getname_np(pthread_self(), name, sizeof(name));
  while (named != nullptr && strcmp(name, named) == 0) pause();
  return syscall(SYS_pwrite64, fd, data, bytes, offset);
}

}  // namespace

extern "C" {

ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) {
  return write_or_hang(fd, data, bytes, offset);
}
ssize_t pwrite64(int fd, const void* data, size_t bytes, off64_t offset) {
  return write_or_hang(fd, data, bytes, offset);
}

}  // extern "C"
