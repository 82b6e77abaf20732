// The pin thread of a host pool, which registers the pool's memory with a device.
#include <pthread.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "transfer/deadline.h"
#include "transfer/host_pool.h"

namespace flexkv {
namespace {

// Unit: seconds. A thread that waits for slots checks at this interval whether the process that made the pool
// still runs.
constexpr double kFollowerWaitS = 0.25;
// Unit: seconds. After each piece the thread rests for as long as the registration took, but for at most this
// long. So the driver's locks are free for the inference engine's calls about half of the time.
constexpr double kMostRestS = 0.1;

}  // namespace

void HostPool::pin(std::shared_ptr<Registrar> registrar, const PinRetries& retries) {
  require_home("pin");
  const std::lock_guard lock(mutex_);
  if (registrar_ || closed()) return;
  registrar_ = std::move(registrar);
  pin_thread_ = std::thread(&HostPool::register_all, this, retries);
  pthread_setname_np(pin_thread_.native_handle(), "flexkv-pin");
}

// Sleeps for `seconds`, or until the pool is closed.
void HostPool::rest(double seconds) const {
  const auto deadline = deadline_in(seconds);
  for (;;) {
    const uint32_t seen = header_->generation.load(std::memory_order_acquire);
    const double left_s = seconds_until(deadline);
    if (stopping_ || left_s <= 0) return;
    await_change(*header_, seen, left_s);
  }
}

// Waits until slots [0, end) are up. Returns false if they will never be up, or if the pool is closing.
bool HostPool::await_slots(int64_t end) const {
  for (;;) {
    const uint32_t seen = header_->generation.load(std::memory_order_acquire);
    // settled() must be called before the number of slots is read. In the opposite order, bring-up could
    // bring up these slots and finish between the two calls, and this function would miss the slots.
    const bool over = settled();
    if (stopping_) return false;
    if (header_->ready_slots.load(std::memory_order_acquire) >= end) return true;
    if (over) return false;
    await_change(*header_, seen, kFollowerWaitS);
  }
}

// The body of the pin thread. Exceptions must not leave it, because they would end the process;
// registration_error() returns their text.
void HostPool::register_all(PinRetries retries) {
  try {
    try_to_register_all(retries);
  } catch (const std::exception& failure) {
    const std::lock_guard lock(mutex_);
    registration_error_ = failure.what();
  }
}

void HostPool::try_to_register_all(const PinRetries& retries) {
  lower_own_priority();
  std::vector<int64_t> refused;
  std::string why;  // why the device refused the first piece that it refused
  const auto attempt = [&](int64_t piece, std::vector<int64_t>& left) {
    const auto start = Clock::now();
    const std::string reason = register_piece(piece);
    if (!reason.empty()) {
      if (left.empty()) why = reason;
      left.push_back(piece);
    }
    rest(std::min(seconds_since(start), kMostRestS));
  };
  for (int64_t piece = 0; piece < pieces_.count; ++piece) {
    const int64_t end = pieces_.first_slot(piece) + pieces_.slots_of(piece);
    if (!await_slots(end)) break;
    attempt(piece, refused);
    pinned_slots_.store(end, std::memory_order_release);
    announce(*header_);
  }
  double pause_s = retries.first_pause_s;
  for (int32_t i = 0; i < retries.tries && !refused.empty(); ++i, pause_s *= 2) {
    rest(pause_s);
    std::vector<int64_t> left;
    for (const int64_t piece : refused) {
      if (stopping_) return;
      attempt(piece, left);
    }
    refused = std::move(left);
  }
  if (refused.empty() || stopping_) return;
  const int64_t first = pieces_.first_slot(refused.front());
  const std::lock_guard lock(mutex_);
  registration_error_ = "slots " + std::to_string(first) + " to " +
                        std::to_string(first + pieces_.slots_of(refused.front()) - 1) +
                        (refused.size() > 1 ? " and others" : "") + " (" + std::to_string(retries.tries + 1) +
                        " tries): " + why;
}

// Registers a piece. Returns an empty string on success, otherwise the reason why the device refused the
// piece.
std::string HostPool::register_piece(int64_t piece) {
  std::string reason = registrar_->add(slot_address(pieces_.first_slot(piece)), pieces_.bytes_of(piece));
  registered_[static_cast<size_t>(piece)].store(reason.empty(), std::memory_order_release);
  if (!reason.empty()) return reason;
  const int64_t extent = pieces_.extent_of(piece);
  const int64_t end = std::min(pieces_.count, (extent + 1) * pieces_.per_extent);
  for (int64_t other = extent * pieces_.per_extent; other < end; ++other) {
    if (!piece_registered(other)) return {};
  }
  const std::lock_guard lock(mutex_);
  reports_[static_cast<size_t>(extent)].registered = true;
  return {};
}

// Unregisters one piece at a time, so that the driver's locks are held only briefly each time.
void HostPool::unregister_all() {
  for (int64_t piece = 0; piece < pieces_.count; ++piece) {
    if (piece_registered(piece)) registrar_->remove(slot_address(pieces_.first_slot(piece)));
  }
}

}  // namespace flexkv
