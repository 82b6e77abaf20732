// Plans a layerwise DISK_READ, which reads a page in one range of layers after another.
//
// The op names pages like any other DISK_READ and sets `layerwise`. Its pages then arrive in the ranges of
// layers that layer_stages() returns: first one range of all pages, then the next. The transfer engine's
// `wait_layer(ticket, layer)` returns when that layer of every page lies verified at its place in the host
// slot. Each range is a separate read (the first one includes the trailer) after which only its own runs are
// verified: if a later range fails, the page's failure is reported then, and in the op's result.
#pragma once
#include <cstdint>
#include <vector>

#include "storage/page_codec.h"

namespace flexkv {

struct ImageSpan {
  int64_t offset = 0;  // in the image, a multiple of 4 KiB
  int64_t bytes = 0;   // a multiple of 4 KiB
};

// Layers [lo, hi) of a slot image, in whole sectors.
struct LayerReads {
  int32_t lo = 0;
  int32_t hi = 0;
  std::vector<ImageSpan> spans;  // ascending, disjoint
  std::vector<size_t> runs;      // numbers of the layers' runs
  // Whether the spans hold only these layers. If so, they may be read directly into place. If not, they
  // include bytes of other layers, which may have been verified already and must not be overwritten.
  bool alone = true;
};

// The first layer of each range, ascending from 0. The first range is small, so that the engine can begin to
// compute; each later one is twice as large, because small reads slow a disk down.
std::vector<int32_t> layer_stages(const PageCodec& codec);
// One entry per stage.
std::vector<LayerReads> plan_layer_reads(const PageCodec& codec);

}  // namespace flexkv
