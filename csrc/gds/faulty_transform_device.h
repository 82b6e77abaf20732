// Injects a device's errors into transforms: what a CUDA error looks like to a transfer.
#pragma once
#include <atomic>
#include <memory>
#include <string>

#include "gds/transform_device.h"

namespace flexkv {

class FaultyTransformDevice : public TransformDevice {
 public:
  explicit FaultyTransformDevice(std::shared_ptr<TransformDevice> inner) : inner_(std::move(inner)) {}

  // The next `count` batches end with an error, after their bytes have moved.
  void fail_batches(int64_t count) { failing_batches_ = count; }
  // Threads that start from now on cannot reach the device.
  void fail_threads(bool fail) { failing_threads_ = fail; }
  void fail_allocation(bool fail) { failing_allocation_ = fail; }
  int64_t allocated() const { return allocated_; }

  std::string name() const override { return inner_->name() + " with faults"; }
  int32_t number() const override { return inner_->number(); }
  void* allocate(int64_t bytes) override;
  void release(void* memory) override;
  std::string bind_thread() override { return failing_threads_ ? "CUDA error 101" : inner_->bind_thread(); }
  int32_t batch_pages(int32_t slots) const override { return inner_->batch_pages(slots); }
  std::string copy(void* dst, const void* src, int64_t bytes) override {
    return inner_->copy(dst, src, bytes);
  }
  std::string cannot_reach(const void* memory, int64_t bytes) const override {
    return inner_->cannot_reach(memory, bytes);
  }
  std::unique_ptr<Transformer> transformer(const PageMap& map, bool into_pool, int32_t max_pages,
                                           StreamEvent* fence) override;
  std::string await_engine(StreamEvent* fence) override { return inner_->await_engine(fence); }

 private:
  class FaultyTransformer;
  std::shared_ptr<TransformDevice> inner_;
  std::atomic<int64_t> failing_batches_{0};
  std::atomic<int64_t> allocated_{0};
  std::atomic<bool> failing_threads_{false};
  std::atomic<bool> failing_allocation_{false};
};

}  // namespace flexkv
