// Placing memory on a NUMA node, by system calls (libnuma is not needed for two of them).
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace flexkv {

inline constexpr int32_t kAnyNode = -1;
// Unit: nodes. What a mask of one word can name; no machine today has more.
inline constexpr int32_t kMostNodes = 64;

// Asks the kernel to take [base, base + bytes), not touched yet, from `node` while that has memory, else from
// another. It is a preference because a binding would call the OOM killer while other nodes are free. Empty,
// or why it failed.
std::string prefer_node(void* base, int64_t bytes, int32_t node);

// The node that holds the page at `address`, which has been touched; kAnyNode where the kernel does not say.
int32_t node_of(const void* address);

}  // namespace flexkv
