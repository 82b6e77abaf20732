// A library to preload into a process. It logs every write, sync and change of names under one folder, in
// order and with the bytes. tests/faults/write_log.py reads the log.  Writes by io_uring are read from the
// rings. The start of a write is logged right before its entry is handed to the kernel. Its end is logged
// when its completion is found after a call, so never too early. So in the log a sync never covers a write
// that it did not cover in fact. Rings with a thread in the kernel are not supported.  RECORD_DIR is the
// folder, RECORD_LOG the file for the log. A record is a header, and then `bytes` bytes.
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

enum Kind : uint32_t { kWrite = 1, kTruncate, kSync, kCreate, kRename, kUnlink, kEnd };

struct Record {
  uint32_t kind;
  uint32_t bytes;   // number of bytes of data or text after the header
  uint64_t number;  // number of the call; the kEnd record of the call has the same number
  uint64_t file;    // inode of the file
  uint64_t folder;  // inode of the folder, in records of changes of names
  uint64_t offset;  // offset of a write, or size of a truncation
};

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
int log_fd = -1;
uint64_t next_number = 1;
char folder[4096];

bool ready() {
  if (log_fd >= 0) return true;
  const char* dir = getenv("RECORD_DIR");
  const char* log = getenv("RECORD_LOG");
  if (dir == nullptr || log == nullptr) return false;
  snprintf(folder, sizeof(folder), "%s/", dir);
  log_fd =
      static_cast<int>(syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  return log_fd >= 0;
}

bool inside(const char* path) { return strncmp(path, folder, strlen(folder)) == 0; }

bool fd_inside(int fd) {
  char link[64], path[4096];
  snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, sizeof(path) - 1);
  if (length < 0) return false;
  path[length] = 0;
  return inside(path) || strlen(path) + 1 == strlen(folder);
}

uint64_t inode(int fd) {
  struct stat info;
  return fstat(fd, &info) == 0 ? info.st_ino : 0;
}

uint64_t folder_of(const char* path) {
  char text[4096];
  snprintf(text, sizeof(text), "%s", path);
  char* slash = strrchr(text, '/');
  if (slash == nullptr) return 0;
  *slash = 0;
  struct stat info;
  return stat(text, &info) == 0 ? info.st_ino : 0;
}

void put(const void* data, size_t bytes) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const long done = syscall(SYS_write, log_fd, at, bytes);
    if (done <= 0) abort();  // if a record is lost, the log proves nothing
    at += done;
    bytes -= static_cast<size_t>(done);
  }
}

uint64_t say(uint32_t kind, uint64_t file, uint64_t in_folder, uint64_t offset, const void* data,
             size_t bytes, uint64_t number = 0) {
  const int kept = errno;
  pthread_mutex_lock(&lock);
  if (number == 0) number = next_number++;
  const Record record{kind, static_cast<uint32_t>(bytes), number, file, in_folder, offset};
  put(&record, sizeof(record));
  put(data, bytes);
  pthread_mutex_unlock(&lock);
  errno = kept;
  return number;
}

void end(uint64_t number) { say(kEnd, 0, 0, 0, nullptr, 0, number); }

int opened(int fd, const char* path, int flags, bool existed) {
  if (fd < 0 || !ready() || !inside(path)) return fd;
  if (!existed && (flags & O_CREAT) != 0) {
    end(say(kCreate, inode(fd), folder_of(path), 0, path, strlen(path)));
  } else if ((flags & O_TRUNC) != 0) {
    end(say(kTruncate, inode(fd), 0, 0, nullptr, 0));
  }
  return fd;
}

int record_open(int dir, const char* path, int flags, mode_t mode) {
  struct stat info;
  const bool existed = stat(path, &info) == 0;
  const long fd = syscall(SYS_openat, dir, path, flags, mode);
  return opened(static_cast<int>(fd), path, flags, existed);
}

mode_t mode_of(int flags, va_list list) {
  return (flags & (O_CREAT | O_TMPFILE)) != 0 ? static_cast<mode_t>(va_arg(list, unsigned)) : 0;
}

ssize_t record_pwrite(int fd, const void* data, size_t bytes, off_t offset) {
  const bool mine = ready() && fd_inside(fd);
  const uint64_t number = mine ? say(kWrite, inode(fd), 0, static_cast<uint64_t>(offset), data, bytes) : 0;
  const ssize_t done = syscall(SYS_pwrite64, fd, data, bytes, offset);
  if (mine) end(number);
  return done;
}

int record_truncate(int fd, off_t size) {
  const bool mine = ready() && fd_inside(fd);
  const uint64_t number = mine ? say(kTruncate, inode(fd), 0, static_cast<uint64_t>(size), nullptr, 0) : 0;
  const int done = static_cast<int>(syscall(SYS_ftruncate, fd, size));
  if (mine) end(number);
  return done;
}

int record_sync(int fd, long call) {
  const bool mine = ready() && fd_inside(fd);
  const uint64_t number = mine ? say(kSync, inode(fd), 0, 0, nullptr, 0) : 0;
  const int done = static_cast<int>(syscall(call, fd));
  if (mine && done == 0) end(number);
  return done;
}

// --- io_uring ---

constexpr int kMostRings = 4096;    // file descriptors of rings are below this number
constexpr int kMostCookies = 4096;  // values of user_data of I/Os are below this number

struct Ring {
  char* rings = nullptr;  // a single mapping with the submission queue and the completion queue
  io_uring_sqe* entries = nullptr;
  io_uring_params params{};
  uint32_t handed = 0;  // number of entries of the submission queue that are in the log
  uint32_t heard = 0;   // number of entries of the completion queue that are in the log
  uint64_t numbers[kMostCookies] = {};

  std::atomic_ref<uint32_t> at(uint32_t offset) const {
    return std::atomic_ref(*reinterpret_cast<uint32_t*>(rings + offset));
  }
};

Ring* rings[kMostRings];

using Call = long (*)(long, ...);

Call kernel() {
  static const auto call = reinterpret_cast<Call>(dlsym(RTLD_NEXT, "syscall"));
  return call;
}

void* map(int fd, size_t bytes, off_t offset) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, offset);
  if (base == MAP_FAILED) abort();
  return base;
}

void ring_made(int fd, const io_uring_params& params) {
  if (fd < 0 || !ready()) return;
  if (fd >= kMostRings || (params.features & IORING_FEAT_SINGLE_MMAP) == 0 ||
      (params.flags & IORING_SETUP_SQPOLL) != 0) {
    abort();
  }
  auto* ring = new Ring;
  ring->params = params;
  const size_t sq = params.sq_off.array + params.sq_entries * sizeof(uint32_t);
  const size_t cq = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
  ring->rings = static_cast<char*>(map(fd, sq > cq ? sq : cq, IORING_OFF_SQ_RING));
  ring->entries =
      static_cast<io_uring_sqe*>(map(fd, params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES));
  rings[fd] = ring;  // an older ring with this descriptor was closed; the mapping of that ring may stay
}

void note_handed(Ring& ring) {
  const uint32_t tail = ring.at(ring.params.sq_off.tail).load(std::memory_order_acquire);
  for (; ring.handed != tail; ++ring.handed) {
    const uint32_t slot = ring.handed & (ring.params.sq_entries - 1);
    const uint32_t entry = ring.at(ring.params.sq_off.array + slot * sizeof(uint32_t)).load();
    const io_uring_sqe& sqe = ring.entries[entry];
    // the bytes of such a write are in memory that its iovecs point to
    if (sqe.opcode == IORING_OP_WRITEV) abort();
    if ((sqe.opcode != IORING_OP_WRITE && sqe.opcode != IORING_OP_WRITE_FIXED) || !fd_inside(sqe.fd)) {
      continue;
    }
    if (sqe.user_data >= kMostCookies) abort();
    const void* data = reinterpret_cast<const void*>(sqe.addr);
    ring.numbers[sqe.user_data] = say(kWrite, inode(sqe.fd), 0, sqe.off, data, sqe.len);
  }
}

void note_ended(Ring& ring) {
  const uint32_t tail = ring.at(ring.params.cq_off.tail).load(std::memory_order_acquire);
  const auto* done = reinterpret_cast<const io_uring_cqe*>(ring.rings + ring.params.cq_off.cqes);
  for (; ring.heard != tail; ++ring.heard) {
    const io_uring_cqe& cqe = done[ring.heard & (ring.params.cq_entries - 1)];
    if (cqe.user_data >= kMostCookies || ring.numbers[cqe.user_data] == 0) continue;
    end(ring.numbers[cqe.user_data]);
    ring.numbers[cqe.user_data] = 0;
  }
}

}  // namespace

extern "C" {

// Always reads six arguments. If the caller passes fewer, the others have arbitrary values, as in the C
// library's own function.
long syscall(long number, ...) noexcept {
  long given[6];
  va_list list;
  va_start(list, number);
  for (long& one : given) one = va_arg(list, long);
  va_end(list);
  Ring* ring = nullptr;
  if (number == SYS_io_uring_enter && given[0] >= 0 && given[0] < kMostRings) ring = rings[given[0]];
  if (ring != nullptr) note_handed(*ring);
  const long done = kernel()(number, given[0], given[1], given[2], given[3], given[4], given[5]);
  const int kept = errno;
  if (ring != nullptr) note_ended(*ring);
  if (number == SYS_io_uring_setup) {
    ring_made(static_cast<int>(done), *reinterpret_cast<const io_uring_params*>(given[1]));
  }
  errno = kept;
  return done;
}

int open(const char* path, int flags, ...) {
  va_list list;
  va_start(list, flags);
  const mode_t mode = mode_of(flags, list);
  va_end(list);
  return record_open(AT_FDCWD, path, flags, mode);
}
int open64(const char* path, int flags, ...) {
  va_list list;
  va_start(list, flags);
  const mode_t mode = mode_of(flags, list);
  va_end(list);
  return record_open(AT_FDCWD, path, flags, mode);
}
int openat(int dir, const char* path, int flags, ...) {
  va_list list;
  va_start(list, flags);
  const mode_t mode = mode_of(flags, list);
  va_end(list);
  return record_open(dir, path, flags, mode);
}
int openat64(int dir, const char* path, int flags, ...) {
  va_list list;
  va_start(list, flags);
  const mode_t mode = mode_of(flags, list);
  va_end(list);
  return record_open(dir, path, flags, mode);
}

ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) {
  return record_pwrite(fd, data, bytes, offset);
}
ssize_t pwrite64(int fd, const void* data, size_t bytes, off64_t offset) {
  return record_pwrite(fd, data, bytes, offset);
}
ssize_t write(int fd, const void* data, size_t bytes) {
  const bool mine = ready() && fd_inside(fd);
  uint64_t number = 0;
  if (mine) {
    const off_t at = lseek(fd, 0, SEEK_CUR);
    number = say(kWrite, inode(fd), 0, static_cast<uint64_t>(at), data, bytes);
  }
  const ssize_t done = syscall(SYS_write, fd, data, bytes);
  if (mine) end(number);
  return done;
}

int ftruncate(int fd, off_t size) noexcept { return record_truncate(fd, size); }
int ftruncate64(int fd, off64_t size) noexcept { return record_truncate(fd, size); }
int fsync(int fd) { return record_sync(fd, SYS_fsync); }
int fdatasync(int fd) { return record_sync(fd, SYS_fdatasync); }

int rename(const char* from, const char* to) noexcept {
  const bool mine = ready() && inside(to);
  char both[8192] = {};
  size_t bytes = 0;
  if (mine) bytes = static_cast<size_t>(snprintf(both, sizeof(both), "%s%c%s", from, '\n', to));
  const uint64_t number = mine ? say(kRename, 0, folder_of(to), 0, both, bytes) : 0;
  const int done = static_cast<int>(syscall(SYS_rename, from, to));
  if (mine) end(number);
  return done;
}

int unlink(const char* path) noexcept {
  const bool mine = ready() && inside(path);
  const uint64_t number = mine ? say(kUnlink, 0, folder_of(path), 0, path, strlen(path)) : 0;
  const int done = static_cast<int>(syscall(SYS_unlink, path));
  if (mine) end(number);
  return done;
}

}  // extern "C"
