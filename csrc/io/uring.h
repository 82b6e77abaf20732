// Wraps io_uring's three system calls. It needs no library, so a wheel runs wherever the kernel has io_uring.
#pragma once
#include <linux/io_uring.h>

#include <cstddef>
#include <cstdint>

namespace flexkv {

// To be used only by the thread that made it.
class Uring {
 public:
  // Throws DiskError with the kernel's reason.
  explicit Uring(uint32_t entries);
  ~Uring();
  Uring(const Uring&) = delete;
  Uring& operator=(const Uring&) = delete;

  // The next free submission entry, zeroed; null when the ring is full until enter().
  io_uring_sqe* next_sqe();
  // Submits the entries that next_sqe() returned and waits until `min_complete` requests have ended. Returns
  // 0 or -errno.
  int enter(uint32_t min_complete);
  // Makes `count` empty places for registered buffers. Returns 0 or -errno.
  int reserve_buffers(uint32_t count);
  // Registers memory in one of those places, which pins its pages. Returns 0 or -errno.
  int register_buffer(uint32_t place, void* base, size_t bytes);
  // The oldest completion not seen yet, or null; seen() releases it.
  const io_uring_cqe* peek_cqe() const;
  void seen();

 private:
  struct Mapping {
    void* base = nullptr;
    size_t bytes = 0;
  };
  uint32_t* at(const Mapping& mapping, uint32_t offset) const {
    return reinterpret_cast<uint32_t*>(static_cast<std::byte*>(mapping.base) + offset);
  }
  void release();

  int fd_ = -1;
  Mapping sq_ring_;
  Mapping cq_ring_;
  Mapping sqe_ring_;
  io_uring_params params_{};
  uint32_t queued_ = 0;  // returned by next_sqe(), not submitted
};

}  // namespace flexkv
