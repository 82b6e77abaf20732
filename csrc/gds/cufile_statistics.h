// Reads from cuFile's own statistics (available since 1.15) how many calls went by DMA between disk and GPU,
// and how many by POSIX calls and copies inside cuFile.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace flexkv {

struct CufileError {
  int32_t code = 0;       // CUfileOpError; 0 is success
  int32_t cuda_code = 0;  // CUresult; 0 if the error is not one of CUDA
};

// Formats an error, for example as "cuFile error 5011 (CUDA error 700)".
std::string to_string(const CufileError& error);

struct CufileStatisticsTable {
  CufileError (*get_level)(int32_t*) = nullptr;
  CufileError (*set_level)(int32_t) = nullptr;
  CufileError (*start)() = nullptr;
  CufileError (*stop)() = nullptr;
  CufileError (*level3)(void*) = nullptr;
  bool complete() const { return get_level && set_level && start && stop && level3; }
};

// CUfilePerGpuStats, whose layout is the same in cuFile 1.15 to 1.20.
struct CufileGpuStatistics {
  char uuid[16];
  uint64_t read_bytes, read_bytes_per_s, read_utilization, read_us;
  uint64_t reads, p2p_reads, nvfs_reads, posix_reads, unaligned_reads, rerouted_reads;
  uint64_t sparse_regions, inline_regions, read_errors;
  uint64_t write_bytes, write_bytes_per_s, write_utilization, write_us;
  uint64_t writes, p2p_writes, nvfs_writes, posix_writes, unaligned_writes, rerouted_writes, write_errors;
  uint64_t registrations[5];
};

inline constexpr size_t kCufileGpus = 16;  // length of the array CUfileStatsLevel3::per_gpu_stats
// Unit: bytes. The size of a buffer for the level 3 statistics: enough for every known version, and for
// additions in newer versions.
inline constexpr size_t kCufileStatisticsBytes = 16384;
// Returns the offset of the per-GPU counts in the level 3 statistics of a version of cuFile (1150 means
// 1.15). Returns nothing if the version's layout is not known.
std::optional<size_t> cufile_statistics_offset(int32_t version);

// The number of the process's reads and writes, by route, since cuFile began to count.
struct CufileOps {
  uint64_t direct = 0;   // by PCI P2PDMA and nvidia-fs
  uint64_t bounced = 0;  // by POSIX calls, and by DMA through another GPU's memory
};

class CufileStatistics {
 public:
  // Makes cuFile's open driver count at level 3, the only level that distinguishes direct from bounced
  // operations. If cuFile refuses, refusal() says why.
  CufileStatistics(const CufileStatisticsTable& table, int32_t version);
  // Stops the statistics if this object started them, and restores the level that they had before.
  ~CufileStatistics();
  CufileStatistics(const CufileStatistics&) = delete;
  CufileStatistics& operator=(const CufileStatistics&) = delete;

  // Says why cuFile does not count its calls; empty if it counts them.
  const std::string& refusal() const { return refusal_; }
  // Returns the current counts, or nothing if cuFile does not count its calls or does not return the counts.
  std::optional<CufileOps> read() const;

 private:
  CufileStatisticsTable table_;
  size_t offset_ = 0;
  std::optional<int32_t> level_before_;  // the level before this object changed it; unset if it did not
  bool started_ = false;
  std::string refusal_;
};

}  // namespace flexkv
