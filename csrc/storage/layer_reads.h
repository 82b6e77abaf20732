// How the layers of a page are read one after the other: a layerwise DISK_READ.
//
// The op names pages, as any other DISK_READ does, and sets `layerwise`. Its pages then arrive in ranges of
// layers, layer_stages() says which: first a range of all pages, then the next. `wait_layer(ticket, layer)`
// of the transfer engine returns when that layer of every page lies verified at its place in the host slot.
// Each range is read by itself, with the first one the trailer, and only its own runs are verified: a page
// that fails in a later range is named then, and by the op's result.
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
  std::vector<ImageSpan> spans;  // ascending, apart
  std::vector<size_t> runs;      // numbers of the layers' runs
  // The spans hold nothing but these layers: they may be read into their place. Else neighbours' bytes come
  // with them, which may have been verified already and must not be written again.
  bool alone = true;
};

// The first layer of each range, ascending from 0. The first range is small, so that computing can begin;
// each later one is twice as large, because a disk is slower the smaller its reads are.
std::vector<int32_t> layer_stages(const PageCodec& codec);
// One entry a stage.
std::vector<LayerReads> plan_layer_reads(const PageCodec& codec);

}  // namespace flexkv
