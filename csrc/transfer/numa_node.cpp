#include "transfer/numa_node.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace flexkv {

std::string prefer_node(void* base, int64_t bytes, int32_t node) {
  const uint64_t mask = uint64_t{1} << node;
  // The kernel reads one bit fewer than the number that is passed to it, so this call passes kMostNodes + 1.
  if (syscall(SYS_mbind, base, static_cast<size_t>(bytes), MPOL_PREFERRED, &mask, kMostNodes + 1, 0) == 0) {
    return {};
  }
  return "mbind to node " + std::to_string(node) + ": " + std::strerror(errno);
}

int32_t node_of(const void* address) {
  int node = kAnyNode;
  const long done =
      syscall(SYS_get_mempolicy, &node, nullptr, 0, const_cast<void*>(address), MPOL_F_NODE | MPOL_F_ADDR);
  return done == 0 ? node : kAnyNode;
}

}  // namespace flexkv
