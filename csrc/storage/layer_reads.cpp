#include "storage/layer_reads.h"

#include <algorithm>

#include "base/align.h"

namespace flexkv {

std::vector<LayerReads> plan_layer_reads(const PageCodec& codec) {
  std::vector<LayerReads> layers(static_cast<size_t>(codec.layers()));
  for (size_t run = 0; run < codec.runs().size(); ++run) {
    const PageRun& at = codec.runs()[run];
    LayerReads& layer = layers[static_cast<size_t>(at.layer)];
    layer.runs.push_back(run);
    const int64_t begin = at.offset / kIoAlignBytes * kIoAlignBytes;
    const int64_t end = round_up(at.offset + at.bytes, kIoAlignBytes);
    if (!layer.spans.empty() && begin <= layer.spans.back().offset + layer.spans.back().bytes) {
      layer.spans.back().bytes = std::max(layer.spans.back().bytes, end - layer.spans.back().offset);
    } else {
      layer.spans.push_back({begin, end - begin});
    }
  }
  for (const PageRun& run : codec.runs()) {
    for (int32_t number = 0; number < codec.layers(); ++number) {
      if (number == run.layer) continue;
      LayerReads& layer = layers[static_cast<size_t>(number)];
      layer.alone &= std::none_of(layer.spans.begin(), layer.spans.end(), [&](const ImageSpan& span) {
        return run.offset < span.offset + span.bytes && span.offset < run.offset + run.bytes;
      });
    }
  }
  return layers;
}

}  // namespace flexkv
