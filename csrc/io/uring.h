// Wraps io_uring's three system calls. It uses no library, so that flexkv's wheel works wherever the kernel
// has io_uring.
#pragma once
#include <linux/io_uring.h>

#include <cstddef>
#include <cstdint>

namespace flexkv {

// One io_uring. Only the thread that called the constructor may use it.
class Uring {
 public:
  // Throws DiskError with the kernel's reason if the kernel refuses the ring.
  explicit Uring(uint32_t entries);
  ~Uring();
  Uring(const Uring&) = delete;
  Uring& operator=(const Uring&) = delete;

  // Returns the next free submission entry, zeroed, or null if the ring is full. enter() frees the entries
  // that it submits.
  io_uring_sqe* next_sqe();
  // Submits the entries that next_sqe() returned and waits until `min_complete` requests have finished.
  // Returns 0, or -errno after an error.
  int enter(uint32_t min_complete);
  // Makes a table of `count` empty places for registered buffers. Returns 0, or -errno after an error.
  int reserve_buffers(uint32_t count);
  // Registers memory at a place in the table of reserve_buffers(). The kernel pins the memory's pages.
  // Returns 0, or -errno after an error.
  int register_buffer(uint32_t place, void* base, size_t bytes);
  // Returns the oldest completion that seen() has not released, or null if there is none.
  const io_uring_cqe* peek_cqe() const;
  // Releases the completion that peek_cqe() returned.
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
  uint32_t queued_ = 0;  // number of entries that next_sqe() has returned since the last enter()
};

}  // namespace flexkv
