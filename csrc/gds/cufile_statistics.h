// Reads the routes of calls from cuFile's own statistics (available since 1.15): by DMA between disk and
// GPU, or by POSIX calls and copies inside cuFile.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace flexkv {

struct CufileError {
  int32_t code = 0;       // CUfileOpError; 0 is success
  int32_t cuda_code = 0;  // CUresult
};

// "cuFile error 5011 (CUDA error 700)".
std::string to_string(const CufileError& error);

struct CufileStatisticsTable {
  CufileError (*get_level)(int32_t*) = nullptr;
  CufileError (*set_level)(int32_t) = nullptr;
  CufileError (*start)() = nullptr;
  CufileError (*stop)() = nullptr;
  CufileError (*level3)(void*) = nullptr;
  bool complete() const { return get_level && set_level && start && stop && level3; }
};

// CUfilePerGpuStats, the same in 1.15 to 1.20.
struct CufileGpuStatistics {
  char uuid[16];
  uint64_t read_bytes, read_bytes_per_s, read_utilization, read_us;
  uint64_t reads, p2p_reads, nvfs_reads, posix_reads, unaligned_reads, rerouted_reads;
  uint64_t sparse_regions, inline_regions, read_errors;
  uint64_t write_bytes, write_bytes_per_s, write_utilization, write_us;
  uint64_t writes, p2p_writes, nvfs_writes, posix_writes, unaligned_writes, rerouted_writes, write_errors;
  uint64_t registrations[5];
};

inline constexpr size_t kCufileGpus = 16;  // CUfileStatsLevel3::per_gpu_stats
// Unit: bytes. Enough for the level 3 statistics of every known version, with room for what a newer one may
// add.
inline constexpr size_t kCufileStatisticsBytes = 16384;
// Where the GPUs' part of level 3 begins in cuFile `version` (1150 is 1.15); unset if its layout is not
// known.
std::optional<size_t> cufile_statistics_offset(int32_t version);

// The process's reads and writes since cuFile began to count.
struct CufileOps {
  uint64_t direct = 0;   // PCI P2PDMA and nvidia-fs
  uint64_t bounced = 0;  // POSIX calls, and DMA through another GPU's memory
};

class CufileStatistics {
 public:
  // Makes cuFile's open driver count at level 3, the only level that tells direct from bounced operations.
  CufileStatistics(const CufileStatisticsTable& table, int32_t version);
  // Stops the statistics if this object started them, and restores their level.
  ~CufileStatistics();
  CufileStatistics(const CufileStatistics&) = delete;
  CufileStatistics& operator=(const CufileStatistics&) = delete;

  // Why nothing is counted; empty if calls are counted.
  const std::string& refusal() const { return refusal_; }
  // Unset if nothing is counted or cuFile refuses this call.
  std::optional<CufileOps> read() const;

 private:
  CufileStatisticsTable table_;
  size_t offset_ = 0;
  std::optional<int32_t> level_before_;  // set if we changed the level
  bool started_ = false;
  std::string refusal_;
};

}  // namespace flexkv
