#include "io/uring.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>

#include "base/error.h"

// Older kernel headers lack these flags. A kernel that does not support them returns EINVAL.
#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif
#ifndef IORING_RSRC_REGISTER_SPARSE
#define IORING_RSRC_REGISTER_SPARSE (1U << 0)
#endif

namespace flexkv {
namespace {

// The numbers and argument structs of IORING_REGISTER_BUFFERS2 and IORING_REGISTER_BUFFERS_UPDATE. Older
// headers lack them or name them differently.
constexpr unsigned kRegisterBuffers2 = 15;
constexpr unsigned kRegisterBuffersUpdate = 16;
struct BufferTable {
  uint32_t count = 0;
  uint32_t flags = 0;
  uint64_t reserved = 0;
  uint64_t data = 0;
  uint64_t tags = 0;
};
struct BufferUpdate {
  uint32_t first = 0;
  uint32_t reserved = 0;
  uint64_t data = 0;
  uint64_t tags = 0;
  uint32_t count = 0;
  uint32_t reserved2 = 0;
};

uint32_t load(const uint32_t* at) {
  return std::atomic_ref(*const_cast<uint32_t*>(at)).load(std::memory_order_acquire);
}
void store(uint32_t* at, uint32_t value) { std::atomic_ref(*at).store(value, std::memory_order_release); }

int setup(uint32_t entries, io_uring_params& params) {
  return static_cast<int>(syscall(__NR_io_uring_setup, entries, &params));
}

void* map(int fd, size_t bytes, off_t offset) {
  return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset);
}

}  // namespace

Uring::Uring(uint32_t entries) {
  // With these flags, the kernel processes completions when the owner thread asks for them, and does not
  // interrupt the thread for them.
  params_.flags = IORING_SETUP_CLAMP | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
  fd_ = setup(entries, params_);
  if (fd_ < 0 && errno == EINVAL) {
    params_ = {};
    params_.flags = IORING_SETUP_CLAMP;
    fd_ = setup(entries, params_);
  }
  if (fd_ < 0) throw DiskError(std::string("io_uring_setup: ") + std::strerror(errno));
  sq_ring_.bytes = params_.sq_off.array + params_.sq_entries * sizeof(uint32_t);
  cq_ring_.bytes = params_.cq_off.cqes + params_.cq_entries * sizeof(io_uring_cqe);
  sqe_ring_.bytes = params_.sq_entries * sizeof(io_uring_sqe);
  sq_ring_.base = map(fd_, sq_ring_.bytes, IORING_OFF_SQ_RING);
  cq_ring_.base = map(fd_, cq_ring_.bytes, IORING_OFF_CQ_RING);
  sqe_ring_.base = map(fd_, sqe_ring_.bytes, IORING_OFF_SQES);
  if (sq_ring_.base == MAP_FAILED || cq_ring_.base == MAP_FAILED || sqe_ring_.base == MAP_FAILED) {
    const int error = errno;
    release();
    throw DiskError(std::string("mapping an io_uring: ") + std::strerror(error));
  }
  for (uint32_t i = 0; i < params_.sq_entries; ++i) at(sq_ring_, params_.sq_off.array)[i] = i;
}

Uring::~Uring() { release(); }

void Uring::release() {
  for (const Mapping& mapping : {sq_ring_, cq_ring_, sqe_ring_}) {
    if (mapping.base != nullptr && mapping.base != MAP_FAILED) munmap(mapping.base, mapping.bytes);
  }
  if (fd_ >= 0) close(fd_);
}

io_uring_sqe* Uring::next_sqe() {
  if (queued_ == params_.sq_entries) return nullptr;
  const uint32_t tail = *at(sq_ring_, params_.sq_off.tail) + queued_;
  auto* sqe = static_cast<io_uring_sqe*>(sqe_ring_.base) + (tail & (params_.sq_entries - 1));
  std::memset(sqe, 0, sizeof(*sqe));
  ++queued_;
  return sqe;
}

int Uring::enter(uint32_t min_complete) {
  uint32_t* tail = at(sq_ring_, params_.sq_off.tail);
  store(tail, *tail + queued_);
  queued_ = 0;
  // The number includes entries that an earlier call of enter() could not submit.
  const uint32_t pending = *tail - load(at(sq_ring_, params_.sq_off.head));
  const long done =
      syscall(__NR_io_uring_enter, fd_, pending, min_complete, IORING_ENTER_GETEVENTS, nullptr, size_t{0});
  return done < 0 ? -errno : 0;
}

int Uring::reserve_buffers(uint32_t count) {
  BufferTable table;
  table.count = count;
  table.flags = IORING_RSRC_REGISTER_SPARSE;
  const long done = syscall(__NR_io_uring_register, fd_, kRegisterBuffers2, &table, sizeof(table));
  return done < 0 ? -errno : 0;
}

int Uring::register_buffer(uint32_t place, void* base, size_t bytes) {
  const iovec memory{base, bytes};
  BufferUpdate update;
  update.first = place;
  update.data = reinterpret_cast<uint64_t>(&memory);
  update.count = 1;
  const long done = syscall(__NR_io_uring_register, fd_, kRegisterBuffersUpdate, &update, sizeof(update));
  return done < 0 ? -errno : 0;
}

const io_uring_cqe* Uring::peek_cqe() const {
  const uint32_t head = *at(cq_ring_, params_.cq_off.head);
  if (head == load(at(cq_ring_, params_.cq_off.tail))) return nullptr;
  const auto* cqes =
      reinterpret_cast<const io_uring_cqe*>(static_cast<std::byte*>(cq_ring_.base) + params_.cq_off.cqes);
  return cqes + (head & (params_.cq_entries - 1));
}

void Uring::seen() {
  uint32_t* head = at(cq_ring_, params_.cq_off.head);
  store(head, *head + 1);
}

}  // namespace flexkv
