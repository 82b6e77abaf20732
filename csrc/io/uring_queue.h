// An I/O queue that uses io_uring.
#pragma once
#include <vector>

#include "io/io_queue.h"
#include "io/uring.h"

namespace flexkv {

class UringQueue : public IoQueue {
 public:
  // Must be called in the owner's thread. Throws DiskError if the kernel refuses the ring or the eventfd.
  explicit UringQueue(int32_t depth, IoMemories memories = {});
  ~UringQueue() override;

  const char* name() const override { return "io_uring"; }
  int32_t depth() const override { return depth_; }
  void submit(const IoRequest& request) override;
  void wait(std::vector<IoDone>& done) override;
  void take(std::vector<IoDone>& done) override;
  void wake() override;

 private:
  struct Memory {
    IoMemory part;
    bool registered = false;
  };
  io_uring_sqe* sqe();
  int32_t registered_place(const IoRequest& request);
  void refuse(const char* what, int error);
  void arm();
  bool collect(std::vector<IoDone>& done, uint32_t min_complete);

  const int32_t depth_;
  Uring ring_;
  int wake_fd_ = -1;
  bool woken_ = false;  // whether wake() was called and has not ended a wait() yet
  // In ascending order of addresses, without overlap. Emptied if registering fails.
  std::vector<Memory> memories_;
  std::function<void(const std::string&)> refused_;
};

}  // namespace flexkv
