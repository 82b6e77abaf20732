// The header of a host pool: the first page of a shared pool's memfd. A process that maps the pool checks in
// the header that this is the right pool, and reads the progress of bring-up from it. The slots' arrivals
// follow it in the file (slot_arrivals.h). A private pool has a header and arrivals on the heap, so that both
// kinds of pool use the same code.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>

namespace flexkv {

// The random identity of a pool. It shows whether a pid or descriptor number was reused for a different
// process or file.
using PoolToken = std::array<uint8_t, 16>;

struct PoolHeader {
  // kPoolMagic while the process that made the pool has it open; 0 afterwards, when no process may attach.
  std::atomic<uint64_t> magic{0};
  PoolToken token{};
  int64_t slot_bytes = 0;
  int64_t slots = 0;
  int64_t extent_bytes = 0;
  int64_t slots_offset = 0;             // offset of slot 0 in the file; 0 in a private pool
  std::atomic<int64_t> ready_slots{0};  // slots [0, ready_slots) are up; never decreases
  std::atomic<uint32_t> generation{0};  // incremented at every change; waiters sleep on it (futex)
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
