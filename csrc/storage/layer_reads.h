// Plans a layerwise DISK_READ, which reads the layers of a page one range after another.
//
// The op names pages like any other DISK_READ and sets `layerwise`. Its pages then arrive in the ranges of
// layers that layer_stages() returns: first one range of all pages, then the next. The transfer engine's
// `wait_layer(ticket, layer)` returns when that layer of every page lies verified at its place in the host
// slot. Each range is read by itself, the first one with the trailer, and only its own runs are verified: a
// page that fails in a later range is reported then, and in the op's result.
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
  // The spans hold only these layers, and may be read into their place. Otherwise they bring bytes of other
  // layers, which may have been verified already and must not be written again.
  bool alone = true;
};

// The first layer of each range, ascending from 0. The first range is small, so that computing can begin;
// each later one is twice as large, because small reads slow a disk down.
std::vector<int32_t> layer_stages(const PageCodec& codec);
// One entry per stage.
std::vector<LayerReads> plan_layer_reads(const PageCodec& codec);

}  // namespace flexkv
