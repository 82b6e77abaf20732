// I/Os by io_uring.
#pragma once
#include "io/io_queue.h"
#include "io/uring.h"

namespace flexkv {

class UringQueue : public IoQueue {
 public:
  // In the owner's thread. Throws DiskError.
  explicit UringQueue(int32_t depth);
  ~UringQueue() override;

  const char* name() const override { return "io_uring"; }
  int32_t depth() const override { return depth_; }
  void submit(const IoRequest& request) override;
  void wait(std::vector<IoDone>& done) override;
  void take(std::vector<IoDone>& done) override;
  void wake() override;

 private:
  io_uring_sqe* sqe();
  void arm();
  bool collect(std::vector<IoDone>& done, uint32_t min_complete);

  const int32_t depth_;
  Uring ring_;
  int wake_fd_ = -1;
};

}  // namespace flexkv
