// The plan of a layerwise DISK_READ op, which reads each page in several ranges of layers.
//
// An op with `layerwise` set lists its pages like any other DISK_READ. The lane reads the first range of all
// pages, then the next range of all pages, and so on; layer_stages() returns the ranges. The transfer
// engine's `wait_layer(ticket, layer)` returns when that layer of every page is verified and in the page's
// host slot. Each range is read separately, and then the runs of this range are verified. The first read
// includes the trailer. If a later range fails, wait_layer() and the op's result report the page as failed.
#pragma once
#include <cstdint>
#include <vector>

#include "storage/page_codec.h"

namespace flexkv {

// A range of bytes of a slot image.
struct ImageSpan {
  int64_t offset = 0;  // start of the span in the image, a multiple of 4 KiB
  int64_t bytes = 0;   // length of the span, a multiple of 4 KiB
};

// How to read layers [lo, hi) of a slot image with I/Os on 4 KiB boundaries.
struct LayerReads {
  int32_t lo = 0;
  int32_t hi = 0;
  std::vector<ImageSpan> spans;  // the parts of the image to read, in ascending order and disjoint
  std::vector<size_t> runs;      // numbers of the layers' runs in PageCodec::runs()
  // Whether the spans contain runs of these layers only. If so, the spans may be read directly into the host
  // slot. If not, the spans include bytes of other layers. These may have been verified already in the slot
  // and must not be overwritten.
  bool alone = true;
};

// Returns the first layer of each range in which a layerwise read reads a page, in ascending order, beginning
// with 0. The first range is small, so that the inference engine can begin to compute early. Each later range
// is twice as large as the one before, because small reads slow a disk down. The last range has the layers
// that are left. If fewer layers are left than the previous range has, they are added to the previous range.
std::vector<int32_t> layer_stages(const PageCodec& codec);
// Returns how to read each range of layer_stages().
std::vector<LayerReads> plan_layer_reads(const PageCodec& codec);

}  // namespace flexkv
