#include "gds/cufile_statistics.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace flexkv {
namespace {

constexpr int32_t kGpuLevel = 3;  // the lowest level of cuFile's statistics that has counts per GPU

static_assert(sizeof(CufileGpuStatistics) == 248);
static_assert(offsetof(CufileGpuStatistics, p2p_reads) == 56);
static_assert(offsetof(CufileGpuStatistics, posix_writes) == 176);

}  // namespace

std::string to_string(const CufileError& error) {
  std::string text = "cuFile error " + std::to_string(error.code);
  if (error.cuda_code != 0) text += " (CUDA error " + std::to_string(error.cuda_code) + ")";
  return text;
}

std::optional<size_t> cufile_statistics_offset(int32_t version) {
  // The offsets come from each version's cufile.h. The level 3 structure begins with the level 1 structure.
  // The latter is larger since version 1.19, which added vectored I/O.
  if (version >= 1150 && version < 1190) return 1032;
  if (version >= 1190 && version < 1210) return 1144;
  return std::nullopt;
}

CufileStatistics::CufileStatistics(const CufileStatisticsTable& table, int32_t version) : table_(table) {
  const auto offset = cufile_statistics_offset(version);
  if (!table_.complete()) {
    refusal_ = "this cuFile has no statistics, which came with 1.15";
    return;
  }
  if (!offset) {
    refusal_ = "the layout of this cuFile's statistics is not known";
    return;
  }
  offset_ = *offset;
  int32_t level = 0;
  if (const CufileError error = table_.get_level(&level); error.code != 0) {
    refusal_ = "cuFileGetStatsLevel: " + to_string(error);
    return;
  }
  if (level < kGpuLevel) {
    if (const CufileError error = table_.set_level(kGpuLevel); error.code != 0) {
      refusal_ = "cuFileSetStatsLevel: " + to_string(error);
      return;
    }
    level_before_ = level;
  }
  if (const CufileError error = table_.start(); error.code != 0) {
    refusal_ = "cuFileStatsStart: " + to_string(error);
    return;
  }
  // If other code in this process had already started the statistics, at any level, this object must not stop
  // them.
  started_ = level_before_ == 0;
}

CufileStatistics::~CufileStatistics() {
  // If one of the calls below fails, cuFile continues to count, which is harmless.
  if (started_) static_cast<void>(table_.stop());
  if (level_before_) static_cast<void>(table_.set_level(*level_before_));
}

std::optional<CufileOps> CufileStatistics::read() const {
  if (!refusal_.empty()) return std::nullopt;
  alignas(8) std::array<std::byte, kCufileStatisticsBytes> level3{};
  if (table_.level3(level3.data()).code != 0) return std::nullopt;
  CufileOps ops;
  for (size_t i = 0; i < kCufileGpus; ++i) {
    CufileGpuStatistics gpu;
    std::memcpy(&gpu, level3.data() + offset_ + i * sizeof(gpu), sizeof(gpu));
    const uint64_t dma = gpu.p2p_reads + gpu.nvfs_reads + gpu.p2p_writes + gpu.nvfs_writes;
    const uint64_t rerouted = gpu.rerouted_reads + gpu.rerouted_writes;
    ops.direct += dma - std::min(dma, rerouted);
    ops.bounced += gpu.posix_reads + gpu.posix_writes + rerouted;
  }
  return ops;
}

}  // namespace flexkv
