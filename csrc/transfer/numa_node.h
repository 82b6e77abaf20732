// Functions that place memory on a NUMA node, through two system calls instead of libnuma.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace flexkv {

inline constexpr int32_t kAnyNode = -1;
// Unit: nodes. The maximum number of NUMA nodes that are supported: the mask of nodes is one word, with one
// bit per node.
inline constexpr int32_t kMostNodes = 64;

// Asks the kernel to allocate [base, base + bytes) on the NUMA node `node`, or on other nodes if `node` has
// no free memory. This is only a preference: with a strict binding, the OOM killer would run although other
// nodes have free memory. Returns an error message, or an empty string on success. Precondition: the memory
// has not been touched yet.
std::string prefer_node(void* base, int64_t bytes, int32_t node);

// Returns the NUMA node of the memory page at `address`; kAnyNode if the kernel does not report it.
// Precondition: the page has been touched.
int32_t node_of(const void* address);

}  // namespace flexkv
