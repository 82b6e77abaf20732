// The arithmetic of the layout transform, which moves pages between staging slots and the engine's pool and,
// in the same pass, makes or checks the digests of their runs. A group of 32 lanes (a warp) handles one leaf
// of one run of one page at a time. Compiled by g++ and nvcc alike: kernel.cuh is the kernel over it,
// testing/transform_lanes.h runs the same functions on the CPU, lane by lane.
#pragma once
#include <cstdint>

#include "base/digest.h"
#include "base/host_device.h"
#include "layout/lane_work.h"
#include "layout/segment.h"

namespace flexkv {

inline constexpr int kTransformLanes = 32;

struct TransformRun {
  uintptr_t base = 0;
  int64_t block_stride = 0;
  int64_t slot_offset = 0;
  int64_t bytes = 0;
  int64_t leaves = 0;
};

// A table entry, so that no lane needs a division to find its leaf.
struct TransformLeaf {
  int32_t run = 0;
  int32_t bytes = 0;
  int64_t index = 0;  // in its run
};

struct TransformPage {
  uintptr_t slot = 0;
  int64_t block = 0;
};

// The progress of one run of one page while warps handle its leaves.
struct RunProgress {
  uint64_t terms = 0;
  uint64_t leaves = 0;
};

enum class TransformMode : int32_t {
  kToPool,          // slot -> pool
  kToSlot,          // pool -> slot
  kToPoolVerified,  // and compare every run's digest with the one in the slot
  kToSlotDigested,  // and write every run's digest into the slot
  kVerifyInPool,    // nothing moves: compare the digests of the pool's runs with those in the slot
  kDigestInPool,    // nothing moves: write the digests of the pool's runs into the slot
};

FLEXKV_HD constexpr bool to_pool(TransformMode mode) {
  return mode == TransformMode::kToPool || mode == TransformMode::kToPoolVerified;
}
FLEXKV_HD constexpr bool in_pool(TransformMode mode) {
  return mode == TransformMode::kVerifyInPool || mode == TransformMode::kDigestInPool;
}
FLEXKV_HD constexpr bool verifies(TransformMode mode) {
  return mode == TransformMode::kToPoolVerified || mode == TransformMode::kVerifyInPool;
}
FLEXKV_HD constexpr bool has_digests(TransformMode mode) {
  return mode != TransformMode::kToPool && mode != TransformMode::kToSlot;
}

// The value of bad_run for a page whose runs are all good.
inline constexpr int32_t kNoBadRun = INT32_MAX;

// The arguments of one launch. All arrays are in memory that the executing processor can access.
struct TransformBatch {
  const TransformRun* runs = nullptr;
  const TransformLeaf* leaves = nullptr;
  const TransformPage* pages = nullptr;
  RunProgress* progress = nullptr;  // [page][run], all zero; only used with digests
  int32_t* bad_run = nullptr;  // [page], kNoBadRun at first; then the lowest run whose digest does not match
  int64_t digest_offset = 0;   // in the slot
  int32_t num_runs = 0;
  int32_t num_leaves = 0;
  int32_t num_pages = 0;
  TransformMode mode = TransformMode::kToPool;
};

// Walks the leaves that belong to one of `warps` warps, which are every `warps`-th leaf over all pages.
// Divides once, not once per leaf.
class LeafWalk {
 public:
  FLEXKV_HD LeafWalk(const TransformBatch& batch, int32_t warp, int32_t warps)
      : pages_(static_cast<uint32_t>(batch.num_pages)),
        leaves_(static_cast<uint32_t>(batch.num_leaves)),
        step_pages_(static_cast<uint32_t>(warps) / leaves_),
        step_leaves_(static_cast<uint32_t>(warps) % leaves_),
        page_(static_cast<uint32_t>(warp) / leaves_),
        leaf_(static_cast<uint32_t>(warp) % leaves_) {}

  FLEXKV_HD bool ended() const { return page_ >= pages_; }
  FLEXKV_HD int32_t page() const { return static_cast<int32_t>(page_); }
  FLEXKV_HD int32_t leaf() const { return static_cast<int32_t>(leaf_); }
  // Precondition: !ended(). No sum overflows, because each adds two numbers below 2^31.
  FLEXKV_HD void advance() {
    page_ += step_pages_;
    leaf_ += step_leaves_;
    if (leaf_ < leaves_) return;
    leaf_ -= leaves_;
    page_ += 1;
  }

 private:
  uint32_t pages_, leaves_, step_pages_, step_leaves_, page_, leaf_;
};

struct LeafEnds {
  unsigned char* dst;
  const unsigned char* src;
};

FLEXKV_HD inline LeafEnds leaf_ends(const TransformBatch& batch, int32_t page, const TransformLeaf& leaf) {
  const TransformRun& run = batch.runs[leaf.run];
  const TransformPage& where = batch.pages[page];
  const auto in_run = static_cast<uintptr_t>(leaf.index * kLeafBytes);
  auto* pool =
      reinterpret_cast<unsigned char*>(block_address(run.base, run.block_stride, where.block) + in_run);
  auto* slot =
      reinterpret_cast<unsigned char*>(where.slot + static_cast<uintptr_t>(run.slot_offset) + in_run);
  if (in_pool(batch.mode)) return {pool, pool};
  return to_pool(batch.mode) ? LeafEnds{pool, slot} : LeafEnds{slot, pool};
}

// The sums of one lane: words 2i and 2i + 1 of the 16-byte vectors i = lane, lane + 32, ..., which belong to
// digest lanes 2 * lane % 8 and the one after it.
struct LaneLeafSums {
  LaneSums even, odd;
};

namespace transform_detail {

FLEXKV_HD inline void add_vector(LaneLeafSums& sums, uint64_t low, uint64_t high, int vector) {
  sums.even.add(low, digest_constant(static_cast<uint64_t>(2 * vector)));
  sums.odd.add(high, digest_constant(static_cast<uint64_t>(2 * vector + 1)));
}

// Adds the words of a vector that may extend past the leaf's end. A word that starts past the end is not part
// of the leaf.
FLEXKV_HD inline void add_partial_vector(LaneLeafSums& sums, const unsigned char* leaf, int bytes,
                                         int vector) {
  const int word = 2 * vector;
  if (word * 8 < bytes) {
    sums.even.add(load_word(leaf, bytes, word), digest_constant(static_cast<uint64_t>(word)));
  }
  if ((word + 1) * 8 < bytes) {
    sums.odd.add(load_word(leaf, bytes, word + 1), digest_constant(static_cast<uint64_t>(word + 1)));
  }
}

template <typename Unit>
FLEXKV_HD inline int copy_units(unsigned char* dst, const unsigned char* src, int from, int bytes, int lane) {
  constexpr int kUnit = sizeof(Unit);
  if (((reinterpret_cast<uintptr_t>(dst) | reinterpret_cast<uintptr_t>(src)) & (kUnit - 1)) != 0) return from;
  const int end = bytes / kUnit;
  for (int i = from / kUnit + lane; i < end; i += kTransformLanes) {
    reinterpret_cast<Unit*>(dst)[i] = reinterpret_cast<const Unit*>(src)[i];
  }
  return end * kUnit;
}

FLEXKV_HD inline void copy_rest(unsigned char* dst, const unsigned char* src, int from, int bytes, int lane) {
  from = copy_units<uint64_t>(dst, src, from, bytes, lane);
  from = copy_units<uint32_t>(dst, src, from, bytes, lane);
  copy_units<uint8_t>(dst, src, from, bytes, lane);
}

}  // namespace transform_detail

// Copies (if kCopy) and sums (if kDigest) `lane`'s part of one leaf of 1 to 4096 bytes. Between
// 16-byte-aligned addresses it moves 16-byte vectors and issues all of a lane's loads before its first store,
// so that eight are in flight; otherwise it moves units of 8, 4 or 1 bytes. It handles every size, with its
// tail.
template <bool kDigest, bool kCopy = true>
FLEXKV_HD inline LaneLeafSums move_leaf_lane(const LeafEnds& ends, int bytes, int lane) {
  namespace detail = transform_detail;
  constexpr int kHeld = static_cast<int>(kLeafBytes / 16 / kTransformLanes);
  LaneLeafSums sums;
  unsigned char* dst = ends.dst;
  const unsigned char* src = ends.src;
  if (((reinterpret_cast<uintptr_t>(dst) | reinterpret_cast<uintptr_t>(src)) & 15u) == 0) {
    const int vectors = bytes / 16;
    // Vectors past the end are set to zero: a register that only some leaves write would have to survive from
    // leaf to leaf, and eight such vectors would leave too few of a thread's 64 registers for the rest.
    Vector16 held[kHeld];
    for (int k = 0; k < kHeld; ++k) {
      const int i = lane + k * kTransformLanes;
      held[k] = i < vectors ? reinterpret_cast<const Vector16*>(src)[i] : Vector16{0, 0};
    }
    for (int k = 0; k < kHeld; ++k) {
      const int i = lane + k * kTransformLanes;
      if (kCopy && i < vectors) reinterpret_cast<Vector16*>(dst)[i] = held[k];
    }
    // Sums come after all stores, when the store addresses no longer occupy registers.
    for (int k = 0; k < kHeld; ++k) {
      const int i = lane + k * kTransformLanes;
      if (kDigest && i < vectors) detail::add_vector(sums, held[k].low, held[k].high, i);
    }
    if constexpr (kCopy) detail::copy_rest(dst, src, vectors * 16, bytes, lane);
    if constexpr (kDigest) {
      if (vectors * 16 < bytes && vectors % kTransformLanes == lane) {
        detail::add_partial_vector(sums, src, bytes, vectors);
      }
    }
  } else {
    if constexpr (kCopy) detail::copy_rest(dst, src, 0, bytes, lane);
    if constexpr (kDigest) {
      for (int i = lane; i * 16 < bytes; i += kTransformLanes) {
        detail::add_partial_vector(sums, src, bytes, i);
      }
    }
  }
  return sums;
}

// Lanes whose numbers are congruent modulo kSumGroups hold sums of the same digest lanes.
inline constexpr int kSumGroups = kDigestLanes / 2;

// What lane `lane` < kSumGroups adds to the leaf's folded value. Precondition: the sums of all lanes
// congruent to it have been added to its own.
FLEXKV_HD inline uint64_t fold_sums(const LaneLeafSums& sums, int lane) {
  return sums.even.folded(2 * lane) + sums.odd.folded(2 * lane + 1);
}

// Ends one leaf; the caller that ends the last leaf of a run makes or checks the run's digest. `Atomics` has
// add(), which returns the previous value, min(), and fence(), which makes that caller see all terms.
template <typename Atomics>
FLEXKV_HD inline void end_leaf(const TransformBatch& batch, int32_t page, const TransformLeaf& leaf,
                               uint64_t folded) {
  const TransformRun& run = batch.runs[leaf.run];
  RunProgress& progress = batch.progress[static_cast<int64_t>(page) * batch.num_runs + leaf.run];
  Atomics::add(&progress.terms,
               leaf_term(folded, static_cast<uint64_t>(leaf.index), static_cast<uint64_t>(leaf.bytes)));
  Atomics::fence();
  if (Atomics::add(&progress.leaves, 1) + 1 != static_cast<uint64_t>(run.leaves)) return;
  Atomics::fence();
  const uint64_t digest = finish_run(Atomics::add(&progress.terms, 0), static_cast<uint64_t>(run.bytes));
  auto* digests =
      reinterpret_cast<uint64_t*>(batch.pages[page].slot + static_cast<uintptr_t>(batch.digest_offset));
  if (!verifies(batch.mode)) {
    digests[leaf.run] = digest;
  } else if (digests[leaf.run] != digest) {
    Atomics::min(&batch.bad_run[page], leaf.run);
  }
}

}  // namespace flexkv
