// Finds out how much memory this process may still allocate. Large allocations must be checked against this
// limit, because otherwise the OOM killer could end the process, and the inference engine with it.
#pragma once
#include <cstdint>
#include <string>

namespace flexkv {

struct MemoryLimit {
  int64_t available_bytes = 0;
  std::string source;  // where the limit comes from: "MemAvailable" or the path of a control group's file
};

// Returns the memory available on the machine (MemAvailable), or the memory left in a control group (v1 or
// v2) that contains this process, whichever is less. The inactive page cache of a group counts as free. Tests
// set the two roots to folders of their own. Throws ContractError if `proc_root`/meminfo cannot be read.
MemoryLimit available_memory(const std::string& proc_root = "/proc",
                             const std::string& cgroup_root = "/sys/fs/cgroup");

// Returns available_memory() with the default roots.
MemoryLimit machine_memory_limit();

// Unit: bytes. Returns how much memory is free in reserved huge pages (HugePages_Free minus HugePages_Rsvd);
// 0 if the default size of huge pages is not 2 MiB.
int64_t free_hugetlb_bytes(const std::string& proc_root = "/proc");

}  // namespace flexkv
