#include "gds/slab_gate.h"

#include <utility>

namespace flexkv {
namespace {

// Unit: seconds since 1970. With this value as the current time, no page counts as expired.
constexpr uint64_t kNoTime = 0;

}  // namespace

SlabGate::SlabGate(std::shared_ptr<const PageCodec> codec, std::shared_ptr<TransformDevice> device,
                   std::vector<SlabPage> pages, size_t runs, std::function<void(int32_t)> on_end)
    : codec_(std::move(codec)),
      device_(std::move(device)),
      pages_(std::move(pages)),
      runs_(runs),
      on_end_(std::move(on_end)),
      trailer_(static_cast<size_t>(codec_->trailer_area_bytes())),
      misses_(pages_.size(), PageMiss::kNone),
      digests_(pages_.size()) {}

std::string SlabGate::arrived(int32_t position, const std::byte* trailer) {
  const auto at = static_cast<size_t>(position);
  const auto bytes = static_cast<int64_t>(trailer_.size());
  if (const std::string why = device_->copy(trailer_.data(), trailer, bytes); !why.empty()) return why;
  // It is not checked whether the page has expired. The page had not expired when a lookup promised it to the
  // inference engine, and a promised page is loaded even if it expires before the load.
  const PageCheck check =
      codec_->check_trailer_alone(trailer_.data(), pages_[at].place, pages_[at].tag, kNoTime);
  misses_[at] = check.miss;
  return check.reason;
}

std::string SlabGate::digested(int32_t position, const std::byte* digests) {
  std::vector<uint64_t>& kept = digests_[static_cast<size_t>(position)];
  kept.resize(runs_);
  return device_->copy(kept.data(), digests, static_cast<int64_t>(runs_ * sizeof(uint64_t)));
}

}  // namespace flexkv
