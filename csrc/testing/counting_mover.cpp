#include "testing/counting_mover.h"

#include "transfer/deadline.h"

namespace flexkv {

MoveResult CountingMover::move(const PageMove& page, int32_t layer_lo, int32_t layer_hi) {
  const auto start = Clock::now();
  MoveResult result = inner_->move(page, layer_lo, layer_hi);
  Cell& cell = cells_[static_cast<size_t>(page.kind)];
  cell.busy_ns += std::chrono::nanoseconds(Clock::now() - start).count();
  if (result.status != Status::kOk) {
    ++cell.failed;
    return result;
  }
  ++cell.moves;
  const int64_t bytes = page.view->layer_bytes(layer_lo, layer_hi);
  cell.bytes += bytes;
  return result;
}

MoveCount CountingMover::count(OpKind kind) const {
  const Cell& cell = cells_[static_cast<size_t>(kind)];
  return {cell.moves, cell.failed, cell.bytes, static_cast<double>(cell.busy_ns) * 1e-9};
}

}  // namespace flexkv
