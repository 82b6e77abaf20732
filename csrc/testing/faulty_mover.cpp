#include "testing/faulty_mover.h"

#include <algorithm>
#include <thread>

#include "transfer/deadline.h"

namespace flexkv {
namespace {

// Unit: ops. The maximum number of ops whose numbers the mover remembers. With the default size of a transfer
// engine's queues, fewer ops are in flight, so the mover never forgets the number of an op in flight.
constexpr size_t kRememberedOps = 16384;
// To damage a byte, the mover computes its exclusive OR with this value.
constexpr std::byte kDamage{0x5A};

template <typename T, typename U>
bool agrees(const std::optional<T>& wanted, const U& given) {
  return !wanted || *wanted == given;
}

}  // namespace

FaultyMover::FaultyMover(std::shared_ptr<PageMover> inner, std::vector<FaultRule> rules)
    : inner_(checked_inner(std::move(inner))), rules_(std::move(rules)) {}

std::optional<FaultRule> FaultyMover::match(const PageMove& page, int32_t layer_lo, int32_t layer_hi) {
  auto [at, is_new] = ordinals_.try_emplace(page.op_id);
  if (is_new) {
    at->second = {ops_seen_++, ops_seen_of_[page.kind]++};
  }
  const auto [of_all, of_kind] = at->second;
  if (ordinals_.size() > kRememberedOps) ordinals_.erase(ordinals_.begin());
  for (FaultRule& rule : rules_) {
    const bool layer_agrees = !rule.layer || (*rule.layer >= layer_lo && *rule.layer < layer_hi);
    if (rule.times == 0 || !layer_agrees || !agrees(rule.kind, page.kind) ||
        !agrees(rule.nth_op, rule.kind ? of_kind : of_all) || !agrees(rule.page, page.position) ||
        !agrees(rule.block, page.block) || !agrees(rule.slot, page.slot)) {
      continue;
    }
    if (rule.action == FaultAction::kStall && stalls_.released()) continue;
    if (rule.times > 0) --rule.times;
    return rule;
  }
  return std::nullopt;
}

MoveResult FaultyMover::move(const PageMove& page, int32_t layer_lo, int32_t layer_hi) {
  std::unique_lock lock(mutex_);
  ++calls_;
  const std::optional<FaultRule> rule = match(page, layer_lo, layer_hi);
  if (!rule) {
    lock.unlock();
    return inner_->move(page, layer_lo, layer_hi);
  }
  ++acted_;
  if (rule->action == FaultAction::kFail) return {Status::kFailed, rule->reason};
  lock.unlock();
  if (rule->action == FaultAction::kStall) stalls_.hold();
  if (rule->action == FaultAction::kDelay) std::this_thread::sleep_for(to_duration(rule->delay_s));
  MoveResult result = inner_->move(page, layer_lo, layer_hi);
  if (rule->action == FaultAction::kCorrupt && result.status == Status::kOk) {
    corrupt(page, layer_lo, layer_hi, rule->corrupt_bytes);
  }
  return result;
}

void FaultyMover::corrupt(const PageMove& page, int32_t layer_lo, int32_t layer_hi, int64_t bytes) const {
  int64_t left = bytes > 0 ? bytes : INT64_MAX;
  for (const Segment& segment : page.view->segments(layer_lo, layer_hi)) {
    std::byte* arrived = page.kind == OpKind::kH2D
                             ? reinterpret_cast<std::byte*>(run_address(segment, page.block))
                             : page.view->stripe(page.slot) + segment.page_offset;
    const int64_t here = std::min(left, segment.run_bytes);
    for (int64_t i = 0; i < here; ++i) arrived[i] ^= kDamage;
    left -= here;
    if (left == 0) return;
  }
}

int64_t FaultyMover::calls() const {
  const std::lock_guard lock(mutex_);
  return calls_;
}

int64_t FaultyMover::acted() const {
  const std::lock_guard lock(mutex_);
  return acted_;
}

}  // namespace flexkv
