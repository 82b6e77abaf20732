#include "testing/faulty_transform_device.h"

#include <utility>

#include "base/error.h"

namespace flexkv {

class FaultyTransformDevice::FaultyTransformer : public Transformer {
 public:
  FaultyTransformer(FaultyTransformDevice& device, std::unique_ptr<Transformer> inner)
      : device_(device), inner_(std::move(inner)) {}
  void launch(std::span<const TransformPage> pages) override { inner_->launch(pages); }
  BatchResult wait() override {
    BatchResult result = inner_->wait();
    int64_t left = device_.failing_batches_;
    while (left > 0 && !device_.failing_batches_.compare_exchange_weak(left, left - 1)) {
    }
    if (left > 0) result.error = "CUDA error 719";
    return result;
  }

 private:
  FaultyTransformDevice& device_;
  std::unique_ptr<Transformer> inner_;
};

void* FaultyTransformDevice::allocate(int64_t bytes) {
  if (failing_allocation_)
    throw CapacityError("staging of " + std::to_string(bytes) + " bytes: CUDA error 2");
  void* memory = inner().allocate(bytes);
  allocated_ += 1;
  return memory;
}

void FaultyTransformDevice::release(void* memory) {
  inner().release(memory);
  allocated_ -= 1;
}

std::unique_ptr<Transformer> FaultyTransformDevice::transformer(const PageMap& map, bool into_pool,
                                                                int32_t max_pages, StreamEvent* fence) {
  return std::make_unique<FaultyTransformer>(*this, inner().transformer(map, into_pool, max_pages, fence));
}

}  // namespace flexkv
