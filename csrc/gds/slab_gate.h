// The gate of a transfer of slab pages: checks which page each slot holds, and keeps the digests of the pages
// written.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gds/staged_transfer.h"
#include "storage/page_codec.h"

namespace flexkv {

// A page of a transfer: its place, and the tag that it must have.
struct SlabPage {
  PagePlace place;
  PageTag tag;
};

// On reads it refuses a page whose trailer is damaged or another page's, by the same rules as the disk lane.
// On writes it keeps the run digests for whoever writes the trailer.
class SlabGate : public PageGate {
 public:
  // `runs`: the number of runs that one rank has, which is the number of digests per page written. `on_end`
  // is called when a page ends.
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
