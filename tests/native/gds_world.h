// A layer-first pool in host memory, raw files, one for each of two "disks", and a manager that moves blocks
// between the pool and the files. Faults can be injected between the manager and the files.
#pragma once
#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gds/gds_manager.h"
#include "gds/posix_file_io.h"
#include "layout/kv_view.h"
#include "testing/faulty_file_io.h"
#include "testing/faulty_transform_device.h"

namespace flexkv {

// Unit: seconds. How long a test waits for an event that must happen. The time is enough even on a busy
// machine and with a sanitizer.
inline constexpr double kGdsGenerousS = 60;

// A temporary folder, which the destructor removes.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "flexkv-gds-XXXXXX").string();
    REQUIRE(mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  std::string file(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

inline int64_t open_files() {
  int64_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

template <typename Io>
struct GdsWorldOf {
  static constexpr int32_t kLayers = 6, kBlocks = 12, kDisks = 2;
  static constexpr int64_t kRun = 3000, kStripe = kLayers * kRun, kDigestOffset = 20480, kImage = 24576;

  explicit GdsWorldOf(std::vector<FileFaultRule> rules = {}, GdsOptions options = {})
      : pool(static_cast<size_t>(kLayers * kBlocks * kRun)) {
    std::vector<Segment> runs;
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      runs.push_back({reinterpret_cast<uintptr_t>(pool.data() + layer * kBlocks * kRun), kRun, kRun,
                      layer * kRun, layer});
    }
    view = std::make_unique<KvView>(runs, kBlocks, kStripe);
    map = std::make_unique<PageMap>(PageMap::stripe(*view, {0, kDigestOffset, kDigestOffset, kImage}, true));
    std::vector<std::vector<std::string>> paths;
    for (int32_t disk = 0; disk < kDisks; ++disk) paths.push_back({folder.file(std::to_string(disk))});
    const auto files = std::make_shared<RawFiles>(paths);
    io = std::make_shared<FaultyFileIo>(std::make_shared<Io>(files), std::move(rules));
    device = std::make_shared<FaultyTransformDevice>(host_transform_device());
    options.max_staging_blocks = 3;
    options.threads_per_device = 2;
    manager = std::make_unique<GDSManager>(files, options, device, io);
  }

  // Returns the page of block i of the pool: image i / 2 on disk i mod 2.
  static StagedPage page(int64_t block) {
    return {block, static_cast<int32_t>(block % kDisks), 0, block / kDisks * kImage};
  }
  static std::vector<StagedPage> pages(int32_t count = kBlocks) {
    std::vector<StagedPage> answer;
    for (int32_t i = 0; i < count; ++i) answer.push_back(page(i));
    return answer;
  }
  void fill(uint32_t seed) {
    std::mt19937 random(seed);
    for (auto& byte : pool) byte = static_cast<unsigned char>(random());
  }
  std::vector<unsigned char> block(int64_t number) const {
    std::vector<unsigned char> bytes;
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      const auto* run = pool.data() + (layer * kBlocks + number) * kRun;
      bytes.insert(bytes.end(), run, run + kRun);
    }
    return bytes;
  }
  TransferReport move(bool is_read, int32_t count = kBlocks) {
    return manager->transfer(*map, pages(count), is_read);
  }
  // Fills the pool, writes every block to disk and zeroes the pool. Returns the bytes that were in the pool.
  std::vector<unsigned char> stored() {
    fill(7);
    const std::vector<unsigned char> content = pool;
    REQUIRE(move(false).ok());
    std::memset(pool.data(), 0, pool.size());
    return content;
  }

  TemporaryFolder folder;
  std::vector<unsigned char> pool;
  std::unique_ptr<KvView> view;
  std::unique_ptr<PageMap> map;
  std::shared_ptr<FaultyFileIo> io;
  std::shared_ptr<FaultyTransformDevice> device;
  std::unique_ptr<GDSManager> manager;
};
using GdsWorld = GdsWorldOf<PosixFileIo>;

}  // namespace flexkv
