// Injects faults into a mover: pages that fail, come late, hang, or arrive damaged.
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
  kFail,     // nothing moves; the page fails with `reason`
  kDelay,    // moves `delay_s` later
  kStall,    // moves after release()
  kCorrupt,  // moves, then damages what arrived, and reports OK
};

// Every condition that is set must hold. The first rule that matches a call acts.
struct FaultRule {
  FaultAction action = FaultAction::kFail;
  std::optional<OpKind> kind = {};
  std::optional<int64_t> nth_op = {};  // the n-th op (from 0) that this mover sees, of `kind` if set
  std::optional<int32_t> page = {};    // position in the op
  std::optional<int32_t> layer = {};   // any call whose layer range contains it
  std::optional<int32_t> block = {};
  std::optional<int32_t> slot = {};
  std::string reason = "injected fault";
  double delay_s = 0;
  int64_t corrupt_bytes = 0;  // how many bytes to damage from the first one moved; 0: all of them
  int64_t times = -1;         // how often the rule acts; -1: always
};

class FaultyMover : public PageMover {
 public:
  FaultyMover(std::shared_ptr<PageMover> inner, std::vector<FaultRule> rules);
  MoveResult move(const PageMove& page, int32_t layer_lo, int32_t layer_hi) override;
  int32_t depth() const override { return inner_->depth() + 1; }

  // Lets stalled calls go on, and later ones pass without stalling.
  void release() { stalls_.release(); }
  int64_t calls() const;                              // of move(), all kinds
  int64_t stalled() const { return stalls_.held(); }  // calls that are stalled now
  int64_t acted() const;                              // calls in which a rule acted
  // Waits until at least `count` calls are stalled at once; false if the deadline passes first.
  bool wait_stalled(int64_t count, double deadline_s) const { return stalls_.wait_held(count, deadline_s); }

 private:
  std::optional<FaultRule> match(const PageMove& page, int32_t layer_lo, int32_t layer_hi);
  void corrupt(const PageMove& page, int32_t layer_lo, int32_t layer_hi, int64_t bytes) const;

  std::shared_ptr<PageMover> inner_;
  mutable std::mutex mutex_;
  std::vector<FaultRule> rules_;
  // Ordinals by op id: (over all kinds, within its kind). Only the latest ops are remembered.
  std::map<int64_t, std::pair<int64_t, int64_t>> ordinals_;
  int64_t ops_seen_ = 0;
  std::map<OpKind, int64_t> ops_seen_of_;
  int64_t calls_ = 0;
  int64_t acted_ = 0;
  StallGate stalls_;
};

}  // namespace flexkv
