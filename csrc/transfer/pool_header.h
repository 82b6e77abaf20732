// The header of a host pool: the first page of a shared pool's memfd. A process that maps the pool checks the
// header to see whether it is the right pool, and reads from it how far bring-up has come. In the file, the
// records of slot arrivals follow the header (slot_arrivals.h). In a private pool, the header and these
// records are on the heap, so that both kinds of pool use the same code.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>

namespace flexkv {

// The random identity of a pool. It shows whether a pid or a descriptor number has been reused for a
// different process or file.
using PoolToken = std::array<uint8_t, 16>;

struct PoolHeader {
  // kPoolMagic while the process that made the pool has it open; 0 afterwards; then no process may attach to
  // the pool.
  std::atomic<uint64_t> magic{0};
  PoolToken token{};
  int64_t slot_bytes = 0;
  int64_t slots = 0;
  int64_t extent_bytes = 0;
  int64_t slots_offset = 0;  // offset of slot 0 in the file; 0 in a private pool
  // Slots [0, ready_slots) have their memory; the number never decreases.
  std::atomic<int64_t> ready_slots{0};
  std::atomic<uint32_t> generation{0};  // incremented by announce(); waiters sleep on it (futex)
  std::atomic<uint32_t> finished{0};    // 1 when bring-up has finished, with or without success; 0 before
};

inline constexpr uint64_t kPoolMagic = 0x33304C4F4F504B46;  // "FKPOOL03", little-endian
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<int64_t>::is_always_lock_free &&
                  std::atomic<uint32_t>::is_always_lock_free,
              "shared between processes");

// Increments `generation`, and wakes all threads that sleep in await_change() in any process with this
// header.
void announce(PoolHeader& header);

// Sleeps until `generation` differs from `seen` or `timeout_s` seconds have passed. May return early.
void await_change(PoolHeader& header, uint32_t seen, double timeout_s);

}  // namespace flexkv
