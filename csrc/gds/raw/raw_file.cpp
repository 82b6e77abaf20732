#include "gds/raw/raw_file.h"

#include <string>

#include "base/error.h"

namespace flexkv {
namespace {

int64_t require_positive(int64_t value, const char* name) {
  if (value > 0) return value;
  throw GeometryError(std::string(name) + " is " + std::to_string(value) + ": must be positive");
}

}  // namespace

RawFileRule::RawFileRule(int32_t devices, int64_t round_robin, int64_t blocks_per_file)
    : devices_(require_positive(devices, "the number of devices")),
      round_robin_(require_positive(round_robin, "round_robin")),
      blocks_per_file_(require_positive(blocks_per_file, "num_blocks_per_file")) {}

BlockPlace RawFileRule::place(int64_t block) const {
  if (block < 0) {
    throw BlockRangeError("block " + std::to_string(block) + " of the raw files: must not be negative");
  }
  const int64_t turn = block / round_robin_;
  const int64_t on_device = turn / devices_ * round_robin_ + block % round_robin_;
  return {static_cast<int32_t>(turn % devices_), on_device / blocks_per_file_, on_device % blocks_per_file_};
}

}  // namespace flexkv
