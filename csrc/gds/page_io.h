// Runs the I/O of a transfer's pages on the threads of their disks.
#pragma once
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "gds/staged_transfer.h"

namespace flexkv {

// The I/O of one page, which a disk's thread performs. The job keeps everything that it touches alive,
// because it may outlive the transfer.
struct PageJob {
  std::vector<IoCall> calls;
  size_t together = 0;  // the first `together` calls may be made in any order, before the others
  std::shared_ptr<StagingBuffer> staging;  // the buffer that the calls use; null for direct I/O
};

struct PageIoResult {
  int32_t position = 0;  // index of the page in the transfer
  int64_t calls = 0;
  int64_t bounced = 0;
  int64_t unknown = 0;  // calls that were direct or bounced, but nothing shows which
  int64_t bytes = 0;
  std::string error;                         // why a call failed; empty if every byte was moved
  StagedFailure cause = StagedFailure::kIo;  // the cause of the error; meaningless if there is none
};

class PageIo {
 public:
  explicit PageIo(const TransferParts& parts) : parts_(parts), shared_(std::make_shared<Shared>()) {}

  void submit(int32_t position, PageJob job);
  int32_t in_flight() const { return in_flight_; }
  // Returns the results of the pages that have finished since the last call. If there are none, waits for up
  // to `wait_s`.
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
