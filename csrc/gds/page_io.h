// Runs the I/O of a transfer's pages on the disks' threads.
#pragma once
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "gds/staged_transfer.h"

namespace flexkv {

// A thread's work for one page. It owns everything it touches, because it may outlive the transfer.
struct PageJob {
  std::vector<IoCall> calls;
  size_t together = 0;                     // how many leading calls may be made in any order
  std::shared_ptr<StagingBuffer> staging;  // null for direct I/O
};

struct PageIoResult {
  int32_t position = 0;
  int64_t calls = 0;
  int64_t bounced = 0;
  int64_t unknown = 0;  // direct or bounced, but nothing shows which
  int64_t bytes = 0;
  std::string error;                         // empty: every byte moved
  StagedFailure cause = StagedFailure::kIo;  // of the error
};

class PageIo {
 public:
  explicit PageIo(const TransferParts& parts) : parts_(parts), shared_(std::make_shared<Shared>()) {}

  void submit(int32_t position, PageJob job);
  int32_t in_flight() const { return in_flight_; }
  // Returns the pages that have ended; waits up to `wait_s` if there are none.
  std::deque<PageIoResult> take_ended(double wait_s);

 private:
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<PageIoResult> ended;
  };
  const TransferParts& parts_;
  std::shared_ptr<Shared> shared_;
  int32_t in_flight_ = 0;
};

}  // namespace flexkv
