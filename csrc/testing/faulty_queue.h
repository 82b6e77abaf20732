// A decorator that injects faults into an I/O queue: errors, short I/Os, damaged bytes, and I/Os that hang.
#pragma once
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "io/io_queue.h"

namespace flexkv {

enum class IoFaultAction : int32_t {
  kFail,     // no byte is moved; the I/O fails with errno `error`
  kShort,    // only the first `bytes` bytes are moved
  kCorrupt,  // all bytes are moved, with one bit of the byte at offset `bytes` flipped; no error is reported
  kStall,    // the I/O begins only after release()
};

// A rule: a fault, and conditions for the I/Os in which the fault is injected. A rule matches an I/O if the
// I/O meets all conditions that are set. If several rules match, only the first one acts.
struct IoFaultRule {
  IoFaultAction action = IoFaultAction::kFail;
  std::optional<bool> write = {};  // condition: whether the I/O writes
  std::optional<int32_t> disk = {};
  // Condition: number of the I/O. The I/Os that meet all other conditions of the rule are counted from 0.
  std::optional<int64_t> nth = {};
  // Condition: this byte of the file is among those that the I/O reads or writes.
  std::optional<int64_t> offset = {};
  int32_t error = 5;   // for kFail: the errno; 5 is EIO
  int64_t bytes = 0;   // its meaning: see kShort and kCorrupt
  int64_t times = -1;  // how many times the rule acts; -1: without limit
  int64_t seen = 0;    // number of I/Os that have met all conditions except `nth`
};

// The fault rules for the queues of all disks. Thread-safe.
class IoFaults : public QueueWrapper, public std::enable_shared_from_this<IoFaults> {
 public:
  explicit IoFaults(std::vector<IoFaultRule> rules) : rules_(std::move(rules)) {}
  std::unique_ptr<IoQueue> wrap(std::unique_ptr<IoQueue> queue, int32_t disk) override;
  std::optional<IoFaultRule> match(const IoRequest& request, int32_t disk);
  void add(const IoFaultRule& rule);
  // Removes all rules and lets stalled I/Os continue.
  void release();
  bool released_since(int64_t generation) const;
  int64_t generation() const;
  int64_t acted() const;
  void count_stalled(int64_t change);
  bool wait_stalled(int64_t count, double deadline_s);
  // Makes each later release() wake `queue`, until forget() is called for the queue.
  void on_release(IoQueue* queue);
  void forget(IoQueue* queue);

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<IoFaultRule> rules_;
  std::vector<IoQueue*> queues_;
  int64_t generation_ = 0;
  int64_t acted_ = 0;
  int64_t stalled_ = 0;
};

class FaultyQueue : public IoQueue {
 public:
  FaultyQueue(std::unique_ptr<IoQueue> inner, std::shared_ptr<IoFaults> faults, int32_t disk);
  ~FaultyQueue() override;

  const char* name() const override { return inner_->name(); }
  int32_t depth() const override { return inner_->depth(); }
  void submit(const IoRequest& request) override;
  void wait(std::vector<IoDone>& done) override;
  void take(std::vector<IoDone>& done) override;
  void wake() override { inner_->wake(); }

 private:
  struct Held {
    IoRequest request;
    int64_t since = 0;
  };
  struct Marked {
    IoRequest request;
    IoFaultRule rule;
  };
  void let_go();
  void spoil(IoDone& done);
  void hand_over(std::vector<IoDone>& done, size_t before);

  std::unique_ptr<IoQueue> inner_;
  std::shared_ptr<IoFaults> faults_;
  int32_t disk_;
  std::vector<IoDone> ready_;   // finished I/Os that never reached the inner queue
  std::vector<Held> held_;      // stalled I/Os
  std::vector<Marked> marked_;  // I/Os in flight with the fault kCorrupt
};

}  // namespace flexkv
