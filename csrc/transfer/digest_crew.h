// A crew of threads that help the calling thread to compute and check the digests of pages.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "transfer/digest_job.h"

namespace flexkv {

// Unit: threads. The largest and the default value of DigestCrew's `threads`. A job usually has at most 32
// shares, so each of more than 16 threads would get fewer than two shares.
inline constexpr int32_t kMostDigestThreads = 16;
inline constexpr int32_t kUsualDigestThreads = 4;

// Threads that help a caller to compute and check digests. The calling thread computes digests, too. If the
// crew's threads are busy or could not be started, the calling thread does more of the work itself. The first
// call that has enough work for two threads starts the crew's threads.
class DigestCrew {
 public:
  using OnShare = std::function<void(DigestWork)>;
  // `threads`: how many threads work for one caller. This includes the caller, so the crew has one thread
  // fewer; with 1 there is no crew. `on_share` is for tests. Each thread calls it after it has taken a share
  // and before it computes digests. It must not throw. Throws ConfigError if `threads` is not in [1,
  // kMostDigestThreads].
  explicit DigestCrew(int32_t threads = kUsualDigestThreads, OnShare on_share = {});
  // Joins the threads. If a caller may still be in check() or write(), call abandon() first.
  ~DigestCrew();
  DigestCrew(const DigestCrew&) = delete;
  DigestCrew& operator=(const DigestCrew&) = delete;

  // check() and write() process layers [lo, hi) of the page in each of `slots`. Several threads may call them
  // at once. At any time the crew helps one caller of check() and one caller of write(), and prefers the
  // caller of check(). Further callers work alone. Precondition: view.has_digests().
  //
  // check() does what check_digests() does, and writes one result per slot. Throws std::bad_alloc.
  void check(const AttachedView& view, std::span<const int32_t> slots, int32_t lo, int32_t hi,
             std::span<MoveResult> results);
  // Does what write_digests_of_stripe() does for each slot. Precondition: no slot occurs twice in `slots`.
  void write(const AttachedView& view, std::span<const int32_t> slots, int32_t lo, int32_t hi) noexcept;

  // Makes the threads return after their current shares, and joins them. Callers of check() and write() then
  // work alone.
  void join();
  // Makes the threads return after their current shares, but does not wait for them. The threads keep all
  // memory that they use alive, so the crew may be destroyed before they return.
  void abandon();

 private:
  struct Shared;
  const std::shared_ptr<Shared> shared_;
};

}  // namespace flexkv
