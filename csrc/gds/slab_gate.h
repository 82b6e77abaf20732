// The gate of a transfer of pages in slabs. The gate checks which page each disk slot contains, and keeps the
// digests of the pages that are written.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gds/staged_transfer.h"
#include "storage/page_codec.h"

namespace flexkv {

// A page of a transfer: its place in a slab, and the tag that it must have.
struct SlabPage {
  PagePlace place;
  PageTag tag;
};

// In a read, the gate refuses a page whose trailer is damaged or belongs to a different page. The rules are
// the same as in the disk lane. In a write, the gate keeps the run digests for the op that will write the
// trailer.
class SlabGate : public PageGate {
 public:
  // `runs` is the number of runs in one rank's stripe, which is also the number of digests per page that is
  // written. The gate calls `on_end` with the position of each page that has finished or failed.
  SlabGate(std::shared_ptr<const PageCodec> codec, std::shared_ptr<TransformDevice> device,
           std::vector<SlabPage> pages, size_t runs, std::function<void(int32_t)> on_end);

  std::string arrived(int32_t position, const std::byte* trailer) override;
  std::string digested(int32_t position, const std::byte* digests) override;
  void ended(int32_t position) override { on_end_(position); }

  // Returns why the gate refused the page; kNone if it did not refuse the page.
  PageMiss miss(int32_t position) const { return misses_[static_cast<size_t>(position)]; }
  std::vector<uint64_t> take_digests(int32_t position) {
    return std::move(digests_[static_cast<size_t>(position)]);
  }

 private:
  const std::shared_ptr<const PageCodec> codec_;
  const std::shared_ptr<TransformDevice> device_;
  const std::vector<SlabPage> pages_;
  const size_t runs_;
  const std::function<void(int32_t)> on_end_;
  std::vector<std::byte> trailer_;
  std::vector<PageMiss> misses_;
  std::vector<std::vector<uint64_t>> digests_;
};

}  // namespace flexkv
