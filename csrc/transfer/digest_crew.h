// Threads that help the calling thread to make and check the digests of pages.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "transfer/digest_job.h"

namespace flexkv {

// Unit: threads. A job has 32 shares at most: with more threads, each would get fewer than two shares.
inline constexpr int32_t kMostDigestThreads = 16;
inline constexpr int32_t kUsualDigestThreads = 4;

// The caller digests as well and never depends on the others: if threads are busy or could not be started, it
// does more of the work itself. The first call with enough work for two starts the threads.
class DigestCrew {
 public:
  using OnShare = std::function<void(DigestWork)>;
  // `threads`: how many work for one caller, including the caller itself, so the crew has one fewer; with 1
  // there is no crew. `on_share` is for tests: each thread calls it when it has taken a share, before it
  // digests; it must not throw. Throws ConfigError unless 1 <= threads <= kMostDigestThreads.
  explicit DigestCrew(int32_t threads = kUsualDigestThreads, OnShare on_share = {});
  // Joins the threads; call abandon() first if a caller may still be inside.
  ~DigestCrew();
  DigestCrew(const DigestCrew&) = delete;
  DigestCrew& operator=(const DigestCrew&) = delete;

  // Both process layers [lo, hi) of the page in each of `slots`. Several threads may call them at once: the
  // crew serves one checking and one writing caller at a time, checks first; further callers work alone.
  // Precondition: view.has_digests().
  // - Does check_digests(), with one result per slot. Throws std::bad_alloc.
  void check(const AttachedView& view, std::span<const int32_t> slots, int32_t lo, int32_t hi,
             std::span<MoveResult> results);
  // - Does write_digests_of_stripe(). Precondition: no slot is named twice.
  void write(const AttachedView& view, std::span<const int32_t> slots, int32_t lo, int32_t hi) noexcept;

  // Ends each thread after its current share, and joins them. Later callers work alone.
  void join();
  // The same without waiting: the threads own everything they touch.
  void abandon();

 private:
  struct Shared;
  const std::shared_ptr<Shared> shared_;
};

}  // namespace flexkv
