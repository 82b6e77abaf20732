// The first page of a shared pool's memfd, which tells another process that it mapped the right pool, and how
// far bring-up has got. The slots' arrivals follow it (slot_arrivals.h). A private pool also has both, on the
// heap, so that both kinds of pool wait in the same way.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>

namespace flexkv {

// Random, so that a recycled pid or fd number is never taken for the pool.
using PoolToken = std::array<uint8_t, 16>;

struct PoolHeader {
  // kPoolMagic while the creator has the pool open; no process may attach after that.
  std::atomic<uint64_t> magic{0};
  PoolToken token{};
  int64_t slot_bytes = 0;
  int64_t slots = 0;
  int64_t extent_bytes = 0;
  int64_t slots_offset = 0;             // of slot 0 in the file
  std::atomic<int64_t> ready_slots{0};  // slots [0, ready) are up; only grows
  std::atomic<uint32_t> generation{0};  // incremented at every change; the futex on which waiters sleep
  std::atomic<uint32_t> finished{0};    // 1: bring-up has ended, complete or short
};

inline constexpr uint64_t kPoolMagic = 0x33304C4F4F504B46;  // "FKPOOL03", little-endian
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<int64_t>::is_always_lock_free &&
                  std::atomic<uint32_t>::is_always_lock_free,
              "shared between processes");

// Wakes every waiter in every process that maps this header.
void announce(PoolHeader& header);

// Sleeps until `generation` is no longer `seen`, or `timeout_s` has passed. May wake early.
void await_change(PoolHeader& header, uint32_t seen, double timeout_s);

}  // namespace flexkv
