#include "gds/cufile_shim.h"

#include "base/align.h"
#include "base/error.h"
#include "gds/cufile_library.h"

namespace flexkv {
namespace {

// The CUfileOpError for a driver that other code in this process has already opened. flexkv can then use the
// driver, too.
constexpr int32_t kDriverAlreadyOpen = 5026;
// All bits of status_flags; each stands for a kind of local or network file system.
constexpr uint32_t kAnyFileSystem = (1u << 16) - 1;
// The bit of feature_flags that cuFile sets, since version 1.16, if it supports PCI P2PDMA.
constexpr uint32_t kP2pSupported = 1u << 4;
// The number of kinds of file systems that cuFile may know: the values of CUfileDriverStatusFlags are below
// this number.
constexpr int32_t kFileSystems = 16;
// Bits of a file system's CUfileP2PFlags: PCI P2PDMA, and a link from chip to chip.
constexpr int32_t kP2pDma = 1 << 0;
constexpr int32_t kChipToChip = 1 << 3;

// Returns the union of all file systems' flags.
int32_t all_p2p_flags(const CufileTable& table) {
  if (table.p2p_flags == nullptr) return 0;
  int32_t all = 0;
  for (int32_t system = 0; system < kFileSystems; ++system) {
    int32_t flags = 0;
    // cuFile returns an error for a file system that it does not support. This counts as no flags.
    if (table.p2p_flags(system, &flags).code == 0) all |= flags;
  }
  return all;
}

std::string direct_ways(const CufileProperties& properties, const CufileTable& table) {
  std::string ways;
  const auto add = [&](const std::string& way) { ways += (ways.empty() ? "" : ", ") + way; };
  const auto& nvfs = properties.nvfs;
  const bool has_nvfs = nvfs.major_version > 0 && (nvfs.status_flags & kAnyFileSystem) != 0;
  if (has_nvfs) {
    add("nvidia-fs " + std::to_string(nvfs.major_version) + "." + std::to_string(nvfs.minor_version));
  }
  const int32_t p2p = all_p2p_flags(table);
  const bool served_without_nvfs = !has_nvfs && (nvfs.status_flags & kAnyFileSystem) != 0;
  if ((properties.feature_flags & kP2pSupported) != 0 || (p2p & kP2pDma) != 0 || served_without_nvfs) {
    add("PCI P2PDMA");
  }
  if ((p2p & kChipToChip) != 0) add("C2C");
  return ways;
}

}  // namespace

std::string cufile_version_text(int32_t version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

Cufile::Cufile(const CufileTable& table, int64_t pinned_bytes) : table_(table) {
  // If cuFile refuses the new limit, for example because it is not a multiple of 4 KiB, cuFile's own limit
  // remains.
  if (pinned_bytes > kCufilePinnedBytes && table_.set_max_pinned_kib != nullptr) {
    table_.set_max_pinned_kib(static_cast<size_t>(pinned_bytes / kIoAlignBytes * (kIoAlignBytes / 1024)));
  }
  const CufileError opened = table_.driver_open();
  if (opened.code != 0 && opened.code != kDriverAlreadyOpen) {
    throw ConfigError("cuFileDriverOpen: " + to_string(opened));
  }
  opened_ = opened.code == 0;
  CufileProperties properties{};
  const CufileError asked = table_.driver_properties(&properties);
  if (asked.code != 0) {
    if (opened_) table_.driver_close();
    throw ConfigError("cuFileDriverGetProperties: " + to_string(asked));
  }
  direct_by_ = direct_ways(properties, table_);
  pinned_limit_ = int64_t{properties.max_device_pinned_kib} * 1024;
  int32_t version = 0;
  if (table_.version != nullptr && table_.version(&version).code != 0) version = 0;
  statistics_ = std::make_unique<CufileStatistics>(table_.statistics, version);
  watch_ = std::make_unique<CufileWatch>([statistics = statistics_.get()] { return statistics->read(); },
                                         direct_by_.empty() ? IoRoute::kBounced : IoRoute::kUnknown);
}

Cufile::~Cufile() {
  statistics_ = nullptr;
  if (opened_) table_.driver_close();
}

std::shared_ptr<Cufile> CufileUsers::join(const std::function<std::optional<CufileTable>()>& load,
                                          int64_t pinned_bytes) {
  const std::lock_guard lock(mutex_);
  if (cufile_ == nullptr) {
    const auto table = load();
    if (!table) return nullptr;
    cufile_ = std::make_shared<Cufile>(*table, pinned_bytes);
  }
  return cufile_;
}

std::shared_ptr<Cufile> shared_cufile(int32_t gpu_count, std::string* why, int64_t pinned_bytes) {
  if (gpu_count < 1) {
    *why = "no GPU";
    return nullptr;
  }
  static CufileUsers& users = *new CufileUsers;  // never destroyed: its destructor would close the driver
  std::string path;
  try {
    return users.join(
        [&]() -> std::optional<CufileTable> {
          const auto library = load_cufile(why);
          if (!library) return std::nullopt;
          path = library->path;
          return library->table;
        },
        pinned_bytes);
  } catch (const ConfigError& error) {
    *why = path + ": " + error.what();
    return nullptr;
  }
}

}  // namespace flexkv
