// The base class of decorators around a transform device. It passes every call that the decorator does not
// override on to the inner device.
#pragma once
#include <memory>
#include <string>
#include <utility>

#include "gds/transform/device.h"

namespace flexkv {

class TransformDeviceAround : public TransformDevice {
 public:
  explicit TransformDeviceAround(std::shared_ptr<TransformDevice> inner) : inner_(std::move(inner)) {}

  std::string name() const override { return inner_->name(); }
  int32_t number() const override { return inner_->number(); }
  void* allocate(int64_t bytes) override { return inner_->allocate(bytes); }
  void release(void* memory) override { inner_->release(memory); }
  int64_t total_bytes() const override { return inner_->total_bytes(); }
  int64_t window_bytes() const override { return inner_->window_bytes(); }
  std::string bind_thread() override { return inner_->bind_thread(); }
  std::string while_current(const std::function<std::string()>& work) override {
    return inner_->while_current(work);
  }
  int32_t batch_pages(int32_t slots) const override { return inner_->batch_pages(slots); }
  std::string copy(void* dst, const void* src, int64_t bytes) override {
    return inner_->copy(dst, src, bytes);
  }
  std::string cannot_reach(const void* memory, int64_t bytes) const override {
    return inner_->cannot_reach(memory, bytes);
  }
  std::unique_ptr<Transformer> transformer(const PageMap& map, bool into_pool, int32_t max_pages,
                                           StreamEvent* fence) override {
    return inner_->transformer(map, into_pool, max_pages, fence);
  }
  std::string await_engine(StreamEvent* fence) override { return inner_->await_engine(fence); }

 protected:
  TransformDevice& inner() { return *inner_; }

 private:
  const std::shared_ptr<TransformDevice> inner_;
};

}  // namespace flexkv
