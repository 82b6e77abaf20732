#include "testing/faulty_file_io.h"

#include <cstddef>
#include <thread>

#include "transfer/deadline.h"

namespace flexkv {

std::optional<FileFaultRule> FaultyFileIo::match(const IoCall& call) {
  for (FileFaultRule& rule : rules_) {
    const bool fits =
        (!rule.write || *rule.write == call.write) && (!rule.device || *rule.device == call.device) &&
        (!rule.offset || (*rule.offset >= call.offset && *rule.offset < call.offset + call.bytes));
    if (!fits || rule.times == 0) continue;
    if (rule.times > 0) rule.times -= 1;
    acted_ += 1;
    return rule;
  }
  return std::nullopt;
}

IoOutcome FaultyFileIo::act(const FileFaultRule& rule, const IoCall& call) {
  switch (rule.fault) {
    case IoFault::kFail:
      return {0, rule.reason, rule.of_memory};
    case IoFault::kShort: {
      IoCall half = call;
      half.bytes /= 2;
      return inner_->transfer(half);
    }
    case IoFault::kDelay:
      std::this_thread::sleep_for(to_duration(rule.delay_s));
      return inner_->transfer(call);
    case IoFault::kStall:
      stalls_.hold();
      return inner_->transfer(call);
    case IoFault::kCorrupt: {
      auto* middle = static_cast<std::byte*>(call.memory) + call.bytes / 2;
      if (call.write) *middle ^= std::byte{1};
      const IoOutcome outcome = inner_->transfer(call);
      if (!call.write) *middle ^= std::byte{1};
      return outcome;
    }
  }
  return {0, "unknown fault"};
}

IoOutcome FaultyFileIo::transfer(const IoCall& call) {
  IoOutcome outcome;
  transfer_all({&call, 1}, {&outcome, 1});
  return outcome;
}

// If no rule matches any of the calls, passes all of them to the inner FileIo at once; otherwise passes them
// one after another.
void FaultyFileIo::transfer_all(std::span<const IoCall> calls, std::span<IoOutcome> outcomes) {
  std::vector<std::optional<FileFaultRule>> rules;
  bool any = false;
  {
    const std::lock_guard lock(mutex_);
    in_flight_ += static_cast<int64_t>(calls.size());
    for (const IoCall& call : calls) any |= rules.emplace_back(match(call)).has_value();
  }
  if (any) {
    for (size_t i = 0; i < calls.size(); ++i) {
      outcomes[i] = rules[i] ? act(*rules[i], calls[i]) : inner_->transfer(calls[i]);
    }
  } else {
    inner_->transfer_all(calls, outcomes);
  }
  const std::lock_guard lock(mutex_);
  in_flight_ -= static_cast<int64_t>(calls.size());
}

int64_t FaultyFileIo::in_flight() const {
  const std::lock_guard lock(mutex_);
  return in_flight_;
}

int64_t FaultyFileIo::acted() const {
  const std::lock_guard lock(mutex_);
  return acted_;
}

}  // namespace flexkv
