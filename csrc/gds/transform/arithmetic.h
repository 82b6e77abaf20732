// The arithmetic of the layout transform, which moves pages between staging slots and the inference engine's
// pool. In the same pass, it computes or checks the digests of the pages' runs. A group of 32 lanes (a warp)
// handles one leaf of one run of one page at a time. g++ and nvcc both compile this file: kernel.cuh uses it
// in a kernel, and csrc/testing/transform_lanes.h runs the same functions on the CPU, lane by lane.
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

// One leaf (a part of a run) of a page. All leaves are listed in a table, so that no lane has to divide to
// find its leaf.
struct TransformLeaf {
  int32_t run = 0;
  int32_t bytes = 0;
  int64_t index = 0;  // the leaf's number in its run
};

struct TransformPage {
  uintptr_t slot = 0;
  int64_t block = 0;
};

// The progress of one run of one page while warps handle its leaves.
struct RunProgress {
  uint64_t terms = 0;   // sum of the terms of the finished leaves
  uint64_t leaves = 0;  // number of finished leaves
};

enum class TransformMode : int32_t {
  kToPool,          // slot -> pool
  kToSlot,          // pool -> slot
  kToPoolVerified,  // slot -> pool, and compare every run's digest with the one in the slot
  kToSlotDigested,  // pool -> slot, and write every run's digest into the slot
  kVerifyInPool,    // move nothing: compare the digests of the pool's runs with those in the slot
  kDigestInPool,    // move nothing: write the digests of the pool's runs into the slot
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

// The value of bad_run for a page whose runs all match their digests.
inline constexpr int32_t kNoBadRun = INT32_MAX;

// The arguments of one kernel launch. All arrays are in memory that the executing processor can access.
struct TransformBatch {
  const TransformRun* runs = nullptr;
  const TransformLeaf* leaves = nullptr;
  const TransformPage* pages = nullptr;
  RunProgress* progress = nullptr;  // [page][run], all zero at first; used only with digests
  int32_t* bad_run = nullptr;  // [page]: the lowest number of a run whose digest does not match, or kNoBadRun
  int64_t digest_offset = 0;   // offset of the digests in a slot
  int32_t num_runs = 0;
  int32_t num_leaves = 0;
  int32_t num_pages = 0;
  TransformMode mode = TransformMode::kToPool;
};

// Iterates over the leaves that one of `warps` warps handles: every `warps`-th leaf, counted over all pages.
// Only the constructor divides, so that no division is needed per leaf.
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
  // Goes to the warp's next leaf. Precondition: !ended(). The sums in this function do not overflow, because
  // each adds two numbers below 2^31.
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

// One lane's sums over the words 2i and 2i + 1 of a leaf, for i = lane, lane + 32, and so on. The even words
// belong to digest lane 2 * lane % 8, the odd words to the digest lane after it.
struct LaneLeafSums {
  LaneSums even, odd;
};

namespace transform_detail {

FLEXKV_HD inline void add_vector(LaneLeafSums& sums, uint64_t low, uint64_t high, int vector) {
  sums.even.add(low, digest_constant(static_cast<uint64_t>(2 * vector)));
  sums.odd.add(high, digest_constant(static_cast<uint64_t>(2 * vector + 1)));
}

// Adds the words of a 16-byte vector that may extend past the leaf's end. A word that starts past the end is
// not part of the leaf and is not added.
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

// Handles one lane's share of a leaf of 1 to 4096 bytes: copies it if kCopy, and sums up its words if
// kDigest. Between 16-byte-aligned addresses it moves 16-byte vectors and issues all of the lane's loads
// before its first store, so that up to eight loads are in flight. Otherwise, and for the tail of a leaf, it
// moves units of 8, 4 or 1 bytes.
template <bool kDigest, bool kCopy = true>
FLEXKV_HD inline LaneLeafSums move_leaf_lane(const LeafEnds& ends, int bytes, int lane) {
  namespace detail = transform_detail;
  constexpr int kHeld = static_cast<int>(kLeafBytes / 16 / kTransformLanes);
  LaneLeafSums sums;
  unsigned char* dst = ends.dst;
  const unsigned char* src = ends.src;
  if (((reinterpret_cast<uintptr_t>(dst) | reinterpret_cast<uintptr_t>(src)) & 15u) == 0) {
    const int vectors = bytes / 16;
    // Vectors past the end are set to zero. Otherwise, a register that is not written for every leaf would
    // have to keep its value from leaf to leaf. Eight such vectors would leave too few of a thread's 64
    // registers for everything else.
    Vector16 held[kHeld];
    for (int k = 0; k < kHeld; ++k) {
      const int i = lane + k * kTransformLanes;
      held[k] = i < vectors ? reinterpret_cast<const Vector16*>(src)[i] : Vector16{0, 0};
    }
    for (int k = 0; k < kHeld; ++k) {
      const int i = lane + k * kTransformLanes;
      if (kCopy && i < vectors) reinterpret_cast<Vector16*>(dst)[i] = held[k];
    }
    // The sums are computed after all stores, when the store addresses no longer occupy registers.
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

// Lanes with the same number modulo kSumGroups have sums of the same two digest lanes.
inline constexpr int kSumGroups = kDigestLanes / 2;

// Returns the number that a lane below kSumGroups adds to the leaf's folded value. Precondition: `sums`
// includes the sums of all lanes whose numbers are equal to `lane` modulo kSumGroups.
FLEXKV_HD inline uint64_t fold_sums(const LaneLeafSums& sums, int lane) {
  return sums.even.folded(2 * lane) + sums.odd.folded(2 * lane + 1);
}

// Adds the term of a finished leaf to its run's sum. The call for the last leaf of a run also writes or
// checks the run's digest. `Atomics` provides min(), add() and fence(). add() returns the previous value.
// fence() ensures that the call for the last leaf sees the terms of all leaves.
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
