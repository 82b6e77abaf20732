#include "layout/page_digest.h"

#include "base/digest.h"

namespace flexkv {

std::vector<uint64_t> page_digests(const KvView& view, const std::byte* stripe) {
  std::vector<uint64_t> digests;
  digests.reserve(view.runs().size());
  for (const Segment& run : view.runs()) {
    digests.push_back(run_digest(stripe + run.page_offset, static_cast<size_t>(run.run_bytes)));
  }
  return digests;
}

}  // namespace flexkv
