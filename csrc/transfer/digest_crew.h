// Threads that make and check the digests of pages together with the thread that asks for them.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "transfer/digest_job.h"

namespace flexkv {

// Unit: threads. A piece has 32 shares at most: more threads would be woken for fewer than two shares each.
inline constexpr int32_t kMostDigestThreads = 16;
inline constexpr int32_t kUsualDigestThreads = 4;

// The caller digests as well and depends on nobody: if threads are busy or could not be started, it only has
// more to do itself. The first call with enough work for two starts them.
class DigestCrew {
 public:
  using OnShare = std::function<void(DigestWork)>;
  // `threads`: how many work for one caller, counting the caller, so the crew has one fewer; with 1 there is
  // no crew. `on_share`, for tests: the thread that has taken a share calls it before it digests; it must not
  // throw. Throws ConfigError unless 1 <= threads <= kMostDigestThreads.
  explicit DigestCrew(int32_t threads = kUsualDigestThreads, OnShare on_share = {});
  // Joins the threads; call abandon() first if a caller may still be inside.
  ~DigestCrew();
  DigestCrew(const DigestCrew&) = delete;
  DigestCrew& operator=(const DigestCrew&) = delete;

  // Both take layers [lo, hi) of the page in each of `slots`. Several threads may call them: one that checks
  // and one that writes have the crew at a time, checks first; others work alone. Precondition:
  // view.has_digests().
  // - As check_digests(), with one result per slot. Throws std::bad_alloc.
  void check(const AttachedView& view, std::span<const int32_t> slots, int32_t lo, int32_t hi,
             std::span<MoveResult> results);
  // - As write_digests_of_stripe(). Precondition: no slot is named twice.
  void write(const AttachedView& view, std::span<const int32_t> slots, int32_t lo, int32_t hi) noexcept;

  // Ends the threads, each after the share that it has, and joins them. Later callers work alone.
  void join();
  // The same without waiting: the threads own what they touch.
  void abandon();

 private:
  struct Shared;
  const std::shared_ptr<Shared> shared_;
};

}  // namespace flexkv
