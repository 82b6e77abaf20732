// A decorator around a FileIo that injects faults into its calls: calls that fail, move too few bytes, finish
// late, hang or damage a byte.
#pragma once
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "gds/file_io.h"
#include "testing/stall_gate.h"

namespace flexkv {

enum class IoFault : int32_t {
  kFail,     // no byte is moved, and the call fails with the text `reason`
  kShort,    // half of the bytes are moved, and no error is reported
  kDelay,    // the bytes are moved after `delay_s` seconds
  kStall,    // the bytes are moved after release()
  kCorrupt,  // all bytes are moved, but the middle byte is damaged
};

// A rule: a fault, and conditions for the calls in which the fault is injected. A rule matches a call if the
// call meets all conditions that are set. If several rules match, only the first one acts.
struct FileFaultRule {
  IoFault fault = IoFault::kFail;
  std::optional<bool> write = {};  // condition: whether the call writes
  // Condition: this byte of the file is among those that the call reads or writes.
  std::optional<int64_t> offset = {};
  std::optional<int32_t> device = {};
  std::string reason = "Input/output error";
  double delay_s = 0;
  int64_t times = -1;  // how many times the rule acts; -1: without limit
  // For kFail: whether the error is reported as an error of the memory instead of the disk.
  bool of_memory = false;
};

class FaultyFileIo : public FileIo {
 public:
  FaultyFileIo(std::shared_ptr<FileIo> inner, std::vector<FileFaultRule> rules)
      : inner_(std::move(inner)), rules_(std::move(rules)) {}
  std::string name() const override { return inner_->name() + " with faults"; }
  IoOutcome transfer(const IoCall& call) override;
  void transfer_all(std::span<const IoCall> calls, std::span<IoOutcome> outcomes) override;
  IoRoute route(const IoCall& call) const override { return inner_->route(call); }
  std::string direct_refusal() const override { return inner_->direct_refusal(); }
  std::vector<IoCall> looks(void* memory, int64_t bytes) const override {
    return inner_->looks(memory, bytes);
  }
  Registering registering() const override { return inner_->registering(); }
  std::string add_memory(void* memory, int64_t bytes) override { return inner_->add_memory(memory, bytes); }
  void remove_memory(void* memory) override { inner_->remove_memory(memory); }

  // Lets stalled calls continue. Later calls do not stall any more.
  void release() { stalls_.release(); }
  // Waits until at least `count` calls are stalled at the same time. Returns false if the deadline passes
  // first.
  bool wait_stalled(int64_t count, double deadline_s) const { return stalls_.wait_held(count, deadline_s); }
  int64_t in_flight() const;
  int64_t acted() const;

 private:
  std::optional<FileFaultRule> match(const IoCall& call);
  IoOutcome act(const FileFaultRule& rule, const IoCall& call);

  std::shared_ptr<FileIo> inner_;
  mutable std::mutex mutex_;
  std::vector<FileFaultRule> rules_;
  int64_t in_flight_ = 0;
  int64_t acted_ = 0;
  StallGate stalls_;
};

}  // namespace flexkv
