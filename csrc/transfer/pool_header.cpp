#include "transfer/pool_header.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <cmath>
#include <ctime>

namespace flexkv {
namespace {

// Calls futex without FUTEX_PRIVATE_FLAG, because waiters may be in another process. (std::atomic::wait would
// use a private futex.)
long shared_futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

}  // namespace

void announce(PoolHeader& header) {
  header.generation.fetch_add(1, std::memory_order_release);
  shared_futex(header.generation, FUTEX_WAKE, INT_MAX, nullptr);
}

void await_change(PoolHeader& header, uint32_t seen, double timeout_s) {
  if (timeout_s <= 0) return;
  const double whole = std::floor(timeout_s);
  const timespec timeout{static_cast<time_t>(whole), static_cast<long>((timeout_s - whole) * 1e9)};
  // The result is ignored, because the caller always checks the generation again, also after EAGAIN (the word
  // has already changed), EINTR and ETIMEDOUT.
  shared_futex(header.generation, FUTEX_WAIT, seen, &timeout);
}

}  // namespace flexkv
