// A decorator around a transform device that injects GPU errors. The injected errors have the texts of CUDA
// errors.
#pragma once
#include <atomic>
#include <memory>
#include <string>

#include "testing/transform_device_around.h"

namespace flexkv {

class FaultyTransformDevice : public TransformDeviceAround {
 public:
  using TransformDeviceAround::TransformDeviceAround;

  // Makes the next `count` batches fail after their bytes have been moved.
  void fail_batches(int64_t count) { failing_batches_ = count; }
  // Sets whether later calls of bind_thread() fail, as they do in threads that cannot use the device.
  void fail_threads(bool fail) { failing_threads_ = fail; }
  void fail_allocation(bool fail) { failing_allocation_ = fail; }
  int64_t allocated() const { return allocated_; }

  std::string name() const override { return TransformDeviceAround::name() + " with faults"; }
  void* allocate(int64_t bytes) override;
  void release(void* memory) override;
  std::string bind_thread() override {
    return failing_threads_ ? "CUDA error 101" : TransformDeviceAround::bind_thread();
  }
  std::unique_ptr<Transformer> transformer(const PageMap& map, bool into_pool, int32_t max_pages,
                                           StreamEvent* fence) override;

 private:
  class FaultyTransformer;
  std::atomic<int64_t> failing_batches_{0};
  std::atomic<int64_t> allocated_{0};
  std::atomic<bool> failing_threads_{false};
  std::atomic<bool> failing_allocation_{false};
};

}  // namespace flexkv
