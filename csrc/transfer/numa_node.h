// Places memory on a NUMA node, with two system calls instead of libnuma.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace flexkv {

inline constexpr int32_t kAnyNode = -1;
// Unit: nodes. As many as a mask of one word can name; no machine today has more.
inline constexpr int32_t kMostNodes = 64;

// Asks the kernel to take [base, base + bytes), which must not have been touched yet, from `node` while that
// has memory, else from another node. It is only a preference, because a binding would invoke the OOM killer
// although other nodes have free memory. Returns an error; empty on success.
std::string prefer_node(void* base, int64_t bytes, int32_t node);

// The node that holds the page at `address`, which has been touched; kAnyNode if the kernel does not report
// it.
int32_t node_of(const void* address);

}  // namespace flexkv
