// How much memory this process may still take. Call this before taking memory: the OOM killer would end a
// process that overcommits, and the engine with it.
#pragma once
#include <cstdint>
#include <string>

namespace flexkv {

struct MemoryLimit {
  int64_t available_bytes = 0;
  std::string source;  // which limit binds, for the error message: "MemAvailable" or the control group's file
};

// Returns the minimum of MemAvailable and what each control group above this process (v1 or v2) has left,
// counting its inactive page cache as free. The roots are parameters for tests. Throws ContractError when
// `proc_root`/meminfo cannot be read.
MemoryLimit available_memory(const std::string& proc_root = "/proc",
                             const std::string& cgroup_root = "/sys/fs/cgroup");

// available_memory() of this machine.
MemoryLimit machine_memory_limit();

// The free pages of the default huge page size (HugePages_Free less HugePages_Rsvd), in bytes; 0 if that size
// is not 2 MiB.
int64_t free_hugetlb_bytes(const std::string& proc_root = "/proc");

}  // namespace flexkv
