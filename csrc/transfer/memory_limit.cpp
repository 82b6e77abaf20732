#include "transfer/memory_limit.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <sstream>

#include "base/error.h"

namespace flexkv {
namespace {

// Returns the number that follows `name` in a line such as "Name: 123 kB" or "name 123". Does not convert its
// unit.
std::optional<int64_t> field(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    if (line.size() > name.size() && line.compare(0, name.size(), name) == 0 &&
        (line[name.size()] == ':' || line[name.size()] == ' ')) {
      std::istringstream rest(line.substr(name.size() + 1));
      int64_t value = 0;
      if (rest >> value) return value;
    }
  }
  return std::nullopt;
}

std::optional<int64_t> number(const std::string& path) {
  std::ifstream file(path);
  int64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;  // the file does not exist, or its content is "max"
}

// Whether the comma-separated `list` has the entry `wanted`.
bool names(const std::string& list, const std::string& wanted) {
  std::istringstream items(list);
  std::string item;
  while (std::getline(items, item, ',')) {
    if (item == wanted) return true;
  }
  return false;
}

// Lowers `limit` to the least memory that is left in any control group from `path` up to the root of the
// hierarchy.
void apply_groups(MemoryLimit& limit, const std::string& hierarchy, std::string path, const char* max_name,
                  const char* usage_name, const char* reclaimable_name) {
  for (;;) {
    const std::string folder = hierarchy + (path == "/" ? "" : path);
    const auto max = number(folder + "/" + max_name);
    const auto usage = number(folder + "/" + usage_name);
    if (max && usage) {
      const int64_t cache = field(folder + "/memory.stat", reclaimable_name).value_or(0);
      const int64_t left = std::max<int64_t>(0, *max - std::max<int64_t>(0, *usage - cache));
      if (left < limit.available_bytes) limit = {left, folder + "/" + max_name};
    }
    if (path.empty() || path == "/") return;
    const size_t slash = path.find_last_of('/');
    path = slash == 0 || slash == std::string::npos ? "/" : path.substr(0, slash);
  }
}

}  // namespace

MemoryLimit available_memory(const std::string& proc_root, const std::string& cgroup_root) {
  const auto mem_available_kib = field(proc_root + "/meminfo", "MemAvailable");
  if (!mem_available_kib) throw ContractError("no MemAvailable in " + proc_root + "/meminfo");
  MemoryLimit limit{*mem_available_kib * 1024, "MemAvailable"};
  std::ifstream groups(proc_root + "/self/cgroup");
  std::string line;
  while (std::getline(groups, line)) {  // a line has the form "hierarchy:controllers:path"
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) {
      apply_groups(limit, cgroup_root, path, "memory.max", "memory.current", "inactive_file");
      // memory.high counts as a limit, because above it the kernel slows down every allocation in the group.
      apply_groups(limit, cgroup_root, path, "memory.high", "memory.current", "inactive_file");
    } else if (names(controllers, "memory")) {
      apply_groups(limit, cgroup_root + "/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes",
                   "total_inactive_file");
    }
  }
  return limit;
}

MemoryLimit machine_memory_limit() { return available_memory(); }

int64_t free_hugetlb_bytes(const std::string& proc_root) {
  const std::string meminfo = proc_root + "/meminfo";
  if (field(meminfo, "Hugepagesize").value_or(0) != 2048) return 0;
  const int64_t pages =
      field(meminfo, "HugePages_Free").value_or(0) - field(meminfo, "HugePages_Rsvd").value_or(0);
  return std::max<int64_t>(0, pages) * (int64_t{2048} * 1024);
}

}  // namespace flexkv
