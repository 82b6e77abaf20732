// Which bytes of a slot image hold one layer, in whole sectors.
#pragma once
#include <cstdint>
#include <vector>

#include "storage/page_codec.h"

namespace flexkv {

struct ImageSpan {
  int64_t offset = 0;  // in the image, a multiple of 4 KiB
  int64_t bytes = 0;   // a multiple of 4 KiB
};

struct LayerReads {
  std::vector<ImageSpan> spans;  // ascending, apart
  std::vector<size_t> runs;      // numbers of the layer's runs
  // The spans hold nothing but the layer: they may be read into their place. Else neighbours' bytes come with
  // them, which may have been verified already and must not be written again.
  bool alone = true;
};

// One entry a layer.
std::vector<LayerReads> plan_layer_reads(const PageCodec& codec);

}  // namespace flexkv
