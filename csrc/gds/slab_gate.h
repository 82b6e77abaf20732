// What a transfer of slab pages knows beyond bytes: whose page a slot must hold, and which digests were made.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gds/staged_transfer.h"
#include "storage/page_codec.h"

namespace flexkv {

// A page of a transfer: where it lies, and what it is asked to be.
struct SlabPage {
  PagePlace place;
  PageTag tag;
};

// Reads: refuses a page whose trailer is damaged or another's, by the same rules as the disk lane. Writes:
// keeps the run digests, for those who write the trailer.
class SlabGate : public PageGate {
 public:
  // `runs`: of one rank, so many digests a write makes for each page. `on_end` is told of every page's end.
  SlabGate(std::shared_ptr<const PageCodec> codec, std::shared_ptr<TransformDevice> device,
           std::vector<SlabPage> pages, size_t runs, std::function<void(int32_t)> on_end);

  std::string arrived(int32_t position, const std::byte* trailer) override;
  std::string digested(int32_t position, const std::byte* digests) override;
  void ended(int32_t position) override { on_end_(position); }

  // Why a page was refused; kNone for one that was not.
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
