// The tag that identifies the page in a disk slot, or the page that a read expects in the slot. Its bytes are
// the same in memory and in the trailer on disk, little-endian. flexkv/storage/tags.py has the Python form.
#pragma once
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

#include "transfer/op.h"

namespace flexkv {

static_assert(std::endian::native == std::endian::little, "the disk format is read and written as it lies");

struct PageTag {
  std::array<uint8_t, 16> key{};
  uint64_t generation = 0;
  uint64_t expiry = 0;  // time at which the page expires, in Unix seconds; 0: never
  uint32_t epoch = 0;
  uint32_t tokens = 0;

  static PageTag read(const uint8_t* bytes) {
    PageTag tag;
    std::memcpy(&tag, bytes, sizeof(tag));
    return tag;
  }
  bool operator==(const PageTag&) const = default;
};
static_assert(sizeof(PageTag) == kTagBytes);

}  // namespace flexkv
