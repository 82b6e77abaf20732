// A decorator that injects faults into a mover: pages that fail, finish late, hang, or are damaged.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "testing/stall_gate.h"
#include "transfer/page_mover.h"

namespace flexkv {

enum class FaultAction : int32_t {
  kFail,     // no byte is moved, and the page fails with the text `reason`
  kDelay,    // the page is moved after `delay_s` seconds
  kStall,    // the page is moved after release()
  kCorrupt,  // the page is moved, then its bytes at the destination are damaged; the call returns OK
};

// A rule: a fault, and conditions for the calls in which the fault is injected. A rule matches a call if the
// call meets all conditions that are set. If several rules match, only the first one acts.
struct FaultRule {
  FaultAction action = FaultAction::kFail;
  std::optional<OpKind> kind = {};
  // Condition: number of the op. The ops that reach the mover are counted from 0; if `kind` is set, only ops
  // of that kind are counted.
  std::optional<int64_t> nth_op = {};
  std::optional<int32_t> page = {};   // condition: position of the page in the op
  std::optional<int32_t> layer = {};  // condition: the call moves this layer
  std::optional<int32_t> block = {};
  std::optional<int32_t> slot = {};
  std::string reason = "injected fault";
  double delay_s = 0;
  int64_t corrupt_bytes = 0;  // number of bytes to damage, beginning with the first byte moved; 0: all bytes
  int64_t times = -1;         // how many times the rule acts; -1: without limit
};

class FaultyMover : public PageMover {
 public:
  FaultyMover(std::shared_ptr<PageMover> inner, std::vector<FaultRule> rules);
  MoveResult move(const PageMove& page, int32_t layer_lo, int32_t layer_hi) override;
  int32_t depth() const override { return inner_->depth() + 1; }

  // Lets stalled calls continue. Later calls do not stall any more.
  void release() { stalls_.release(); }
  int64_t calls() const;                              // number of calls of move() so far, for all kinds of op
  int64_t stalled() const { return stalls_.held(); }  // number of calls that are stalled at present
  int64_t acted() const;                              // number of calls so far in which a rule acted
  // Waits until at least `count` calls are stalled at the same time. Returns false if the deadline passes
  // first.
  bool wait_stalled(int64_t count, double deadline_s) const { return stalls_.wait_held(count, deadline_s); }

 private:
  std::optional<FaultRule> match(const PageMove& page, int32_t layer_lo, int32_t layer_hi);
  void corrupt(const PageMove& page, int32_t layer_lo, int32_t layer_hi, int64_t bytes) const;

  std::shared_ptr<PageMover> inner_;
  mutable std::mutex mutex_;
  std::vector<FaultRule> rules_;
  // For each op id, two numbers of the op: its number among all ops, and its number among the ops of its own
  // kind. Only the ops with the highest ids are listed.
  std::map<int64_t, std::pair<int64_t, int64_t>> ordinals_;
  int64_t ops_seen_ = 0;
  std::map<OpKind, int64_t> ops_seen_of_;
  int64_t calls_ = 0;
  int64_t acted_ = 0;
  StallGate stalls_;
};

}  // namespace flexkv
