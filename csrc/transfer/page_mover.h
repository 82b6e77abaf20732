// The interface of movers, which copy the bytes of one page. Movers can be nested: for example, a mover that
// injects faults may contain a mover that counts calls, which contains the mover that copies.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/status.h"
#include "transfer/attached_view.h"
#include "transfer/op.h"

namespace flexkv {

// One page of an op, for the lane or mover that moves it. Pointers and spans are valid until the page
// finishes.
struct PageMove {
  int64_t op_id = 0;
  OpKind kind = OpKind::kH2D;
  int32_t position = 0;                // position of the page in the op
  int32_t block = 0;                   // the inference engine's block; -1 for a kind without a device side
  int32_t slot = -1;                   // slot in the host pool; -1 for a kind without a host side
  const AttachedView* view = nullptr;  // null for a kind without a device side
  int32_t group = 0;
  int32_t place = -1;                      // place (disk slot); -1 for a kind without places
  const uint8_t* tag = nullptr;            // kTagBytes bytes; null for a kind without places
  std::span<const uint64_t> digests = {};  // for kDiskSeal only: digests of the page's runs
};

// The result of moving one page.
struct MoveResult {
  Status status = Status::kOk;
  std::string reason;                           // explanation for log messages; empty for kOk
  std::vector<uint64_t> digests = {};           // for kGdsWrite only: digests of the runs that were written
  FailureCause cause = FailureCause::kUnknown;  // used only for kFailed
};

class PageMover {
 public:
  virtual ~PageMover() = default;
  // Moves layers [layer_lo, layer_hi) of the page. Returns when none of their bytes is being moved any more.
  // Several threads may call this at once, but not for the same page. If it throws, the page has failed.
  virtual MoveResult move(const PageMove& page, int32_t layer_lo, int32_t layer_hi) = 0;
  // The number of movers that are nested in this mover.
  virtual int32_t depth() const { return 0; }
};

// The maximum number of movers nested in one mover. The limit bounds the depth of the stack, because each
// call and each destructor goes through all nested movers.
inline constexpr int32_t kMostMoversInside = 64;

// Returns `inner`, the mover that a new mover will contain. Throws ContractError if the new mover would
// contain more than kMostMoversInside movers.
inline std::shared_ptr<PageMover> checked_inner(std::shared_ptr<PageMover> inner) {
  if (inner->depth() + 1 <= kMostMoversInside) return inner;
  throw ContractError("a mover around " + std::to_string(inner->depth() + 1) + " others; allowed are " +
                      std::to_string(kMostMoversInside));
}

}  // namespace flexkv
