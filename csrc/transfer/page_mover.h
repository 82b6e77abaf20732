// Moves the bytes of one page. Movers can be nested: a fault injector around a counter around the real one.
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

// Page `position` of op `op_id`: blocks[position] <-> slots[position], as far as its kind has blocks and
// slots.
struct PageMove {
  int64_t op_id = 0;
  OpKind kind = OpKind::kH2D;
  int32_t position = 0;
  int32_t block = 0;
  int32_t slot = -1;
  const AttachedView* view = nullptr;  // null for a kind without a device side
  int32_t group = 0;
  int32_t place = -1;                      // only for kinds that have places
  const uint8_t* tag = nullptr;            // kTagBytes for such a kind, valid until the page's end
  std::span<const uint64_t> digests = {};  // kDiskSeal: for the page's runs, valid until its end
};

struct MoveResult {
  Status status = Status::kOk;
  std::string reason;                           // for people; empty for OK
  std::vector<uint64_t> digests = {};           // kGdsWrite: for the runs that were written
  FailureCause cause = FailureCause::kUnknown;  // counts only for kFailed
};

class PageMover {
 public:
  virtual ~PageMover() = default;
  // Moves layers [layer_lo, layer_hi), and returns when their last byte has moved or none will move any more.
  // Several threads may call it at once, but never for the same page. If it throws, the page has failed.
  virtual MoveResult move(const PageMove& page, int32_t layer_lo, int32_t layer_hi) = 0;
  // The number of movers inside this one.
  virtual int32_t depth() const { return 0; }
};

// The most nested movers: calls and destructors go through all of them, with one stack frame each.
inline constexpr int32_t kMostMoversInside = 64;

// Returns `inner`, or throws ContractError if one more mover around it is one too many.
inline std::shared_ptr<PageMover> checked_inner(std::shared_ptr<PageMover> inner) {
  if (inner->depth() + 1 <= kMostMoversInside) return inner;
  throw ContractError("a mover around " + std::to_string(inner->depth() + 1) + " others; allowed are " +
                      std::to_string(kMostMoversInside));
}

}  // namespace flexkv
