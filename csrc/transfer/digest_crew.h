// Threads that make and check the digests of pages together with the thread that asks for them.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "transfer/digest_job.h"

namespace flexkv {

// Unit: threads. A piece has 32 shares at most: more threads would be woken for less than two each.
inline constexpr int32_t kMostDigestThreads = 16;
inline constexpr int32_t kUsualDigestThreads = 4;

// The caller digests as well and needs nobody: threads that are busy, or could not be started, are missed by
// what they would have done and by nothing else. They are started by the first call that has enough for two.
class DigestCrew {
 public:
  using OnShare = std::function<void(DigestWork)>;
  // `threads`: that work for one caller, itself among them, so that the crew is one less; with 1 there is
  // none. `on_share`: called by whoever has taken a share, before it digests, for tests; it must not throw.
  // Throws ConfigError unless 1 <= threads <= kMostDigestThreads.
  explicit DigestCrew(int32_t threads = kUsualDigestThreads, OnShare on_share = {});
  // Joins; abandon() first where a caller may be in here yet.
  ~DigestCrew();
  DigestCrew(const DigestCrew&) = delete;
  DigestCrew& operator=(const DigestCrew&) = delete;

  // Of layers [lo, hi) of the page in each of `slots`. Several threads may call: one that checks and one that
  // writes have the crew at a time, checks first; others work alone. Precondition: view.has_digests().
  // - As check_digests(), one result a slot. Throws std::bad_alloc.
  void check(const AttachedView& view, std::span<const int32_t> slots, int32_t lo, int32_t hi,
             std::span<MoveResult> results);
  // - As write_digests_of_stripe(). Precondition: no slot is there twice.
  void write(const AttachedView& view, std::span<const int32_t> slots, int32_t lo, int32_t hi) noexcept;

  // Ends the threads, which go on with no share but the one they have. Who calls from then on works alone.
  void join();
  // The same without waiting: the threads own what they touch.
  void abandon();

 private:
  struct Shared;
  const std::shared_ptr<Shared> shared_;
};

}  // namespace flexkv
