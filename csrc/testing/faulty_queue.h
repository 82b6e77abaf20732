// Injects faults into a queue: errors, short I/Os, damaged bytes, and I/Os that hang.
#pragma once
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "io/io_queue.h"

namespace flexkv {

enum class IoFaultAction : int32_t {
  kFail,     // nothing moves; ends with -`error`
  kShort,    // moves only the first `bytes`
  kCorrupt,  // moves, then flips a bit of the byte at `bytes`; reports OK
  kStall,    // ends after release()
};

// Every condition that is set must hold. The first rule that matches acts.
struct IoFaultRule {
  IoFaultAction action = IoFaultAction::kFail;
  std::optional<bool> write = {};
  std::optional<int32_t> disk = {};
  std::optional<int64_t> nth = {};     // the n-th I/O (from 0) that meets the other conditions
  std::optional<int64_t> offset = {};  // the I/O covers this byte of the file
  int32_t error = 5;                   // EIO
  int64_t bytes = 0;
  int64_t times = -1;  // how often the rule acts; -1: always
  int64_t seen = 0;    // how many I/Os have met the conditions
};

// Shared by the queues of all disks. Thread-safe.
class IoFaults : public QueueWrapper, public std::enable_shared_from_this<IoFaults> {
 public:
  explicit IoFaults(std::vector<IoFaultRule> rules) : rules_(std::move(rules)) {}
  std::unique_ptr<IoQueue> wrap(std::unique_ptr<IoQueue> queue, int32_t disk) override;
  std::optional<IoFaultRule> match(const IoRequest& request, int32_t disk);
  void add(const IoFaultRule& rule);
  // Removes all rules and lets stalled I/Os end.
  void release();
  bool released_since(int64_t generation) const;
  int64_t generation() const;
  int64_t acted() const;
  void count_stalled(int64_t change);
  bool wait_stalled(int64_t count, double deadline_s);
  // From now on each release() wakes this queue, whichever thread calls it.
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
  std::vector<IoDone> ready_;   // I/Os that ended without moving
  std::vector<Held> held_;      // I/Os that hang
  std::vector<Marked> marked_;  // I/Os to be damaged when they end
};

}  // namespace flexkv
