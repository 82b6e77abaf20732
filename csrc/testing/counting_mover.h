// A mover that counts the calls and bytes of another mover, for each kind of op.
#pragma once
#include <array>
#include <atomic>
#include <memory>

#include "transfer/page_mover.h"

namespace flexkv {

struct MoveCount {
  // Number of calls that returned OK. A page that is moved layer by layer takes one call per layer.
  int64_t moves = 0;
  int64_t failed = 0;  // number of calls that did not return OK
  int64_t bytes = 0;   // number of bytes moved by calls that returned OK
  double busy_s = 0;   // seconds spent in calls, added up over all threads
};

class CountingMover : public PageMover {
 public:
  explicit CountingMover(std::shared_ptr<PageMover> inner) : inner_(checked_inner(std::move(inner))) {}
  MoveResult move(const PageMove& page, int32_t layer_lo, int32_t layer_hi) override;
  int32_t depth() const override { return inner_->depth() + 1; }
  MoveCount count(OpKind kind) const;

 private:
  struct Cell {
    std::atomic<int64_t> moves{0}, failed{0}, bytes{0}, busy_ns{0};
  };
  std::shared_ptr<PageMover> inner_;
  std::array<Cell, kOpKinds> cells_;
};

}  // namespace flexkv
