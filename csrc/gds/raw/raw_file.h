// Computes where a block lies in raw files: on which device, in which file, and where in the file. Raw files
// contain blocks without headers and trailers, and are spread over several devices. docs/gds.md states the
// rule.
#pragma once
#include <cstdint>

namespace flexkv {

struct BlockPlace {
  int32_t device = 0;
  int64_t file = 0;  // number of the file on its device
  // Number of the block in its file. Its offset in the file is this number times the block stride.
  int64_t block_in_file = 0;
};

class RawFileRule {
 public:
  // `round_robin` consecutive blocks lie on one device, the next `round_robin` blocks on the next device.
  // Throws GeometryError unless all three numbers are positive.
  RawFileRule(int32_t devices, int64_t round_robin, int64_t blocks_per_file);

  // Returns where `block` lies. Throws BlockRangeError if it is negative.
  BlockPlace place(int64_t block) const;

 private:
  int64_t devices_;
  int64_t round_robin_;
  int64_t blocks_per_file_;
};

}  // namespace flexkv
