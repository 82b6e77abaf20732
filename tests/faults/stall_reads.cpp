// A library to preload into a process. A caller chooses one byte of a page. The library stalls reads that
// cover this byte of any page, until let_reads_go() is called.
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace {

std::atomic<int64_t> first_page{0};
std::atomic<int64_t> page_bytes{0};  // page size; 0: no read is stalled
std::atomic<int64_t> place_in_page{0};
std::atomic<int64_t> stalled{0};

bool covers(int64_t offset, int64_t bytes) {
  const int64_t size = page_bytes;
  if (size == 0 || offset < first_page) return false;
  // `ahead` is the distance from the start of the read to the next byte at which reads are stalled.
  const int64_t in_page = (offset - first_page) % size;
  const int64_t ahead = (place_in_page - in_page + size) % size;
  return ahead < bytes;
}

ssize_t read_or_stall(int fd, void* data, size_t bytes, off_t offset) {
  if (covers(offset, static_cast<int64_t>(bytes))) {
    ++stalled;
    while (page_bytes != 0) usleep(1000);
  }
  return syscall(SYS_pread64, fd, data, bytes, offset);
}

}  // namespace

extern "C" {

void stall_reads(int64_t header_bytes, int64_t bytes_of_page, int64_t offset_in_page) {
  first_page = header_bytes;
  place_in_page = offset_in_page;
  stalled = 0;
  page_bytes = bytes_of_page;
}
int64_t stalled_reads() { return stalled; }
void let_reads_go() { page_bytes = 0; }

ssize_t pread(int fd, void* data, size_t bytes, off_t offset) {
  return read_or_stall(fd, data, bytes, offset);
}
ssize_t pread64(int fd, void* data, size_t bytes, off64_t offset) {
  return read_or_stall(fd, data, bytes, offset);
}

}  // extern "C"
