// Injects faults into file I/O: calls that fail, fall short, end late or never, and bytes that are damaged.
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
  kFail,     // nothing moves; `reason` is the error
  kShort,    // half of the bytes move, without an error
  kDelay,    // moves `delay_s` later
  kStall,    // moves after release()
  kCorrupt,  // moves all bytes, the middle one of them damaged
};

// Every condition that is set must hold; the first rule that matches a call acts.
struct FileFaultRule {
  IoFault fault = IoFault::kFail;
  std::optional<bool> write = {};
  std::optional<int64_t> offset = {};  // calls whose range holds this byte of the file
  std::optional<int32_t> device = {};
  std::string reason = "Input/output error";
  double delay_s = 0;
  int64_t times = -1;      // how often the rule acts; -1: always
  bool of_memory = false;  // kFail: the error is the memory's, not the disk's
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

  // Lets stalled calls go on, and later ones pass without stalling.
  void release() { stalls_.release(); }
  // Waits until `count` calls are stalled at once; false if the deadline passes first.
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
