// A fake libcufile. It uses host memory as GPU memory. A test lists the files for which the fake uses POSIX
// I/O instead of the direct route.
#pragma once
#include <doctest/doctest.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "gds/bounced_file_io.h"
#include "gds/cufile_io.h"
#include "gds/cufile_shim.h"
#include "gds_world.h"

namespace flexkv {

struct FakeCufile {
  std::mutex mutex;
  int32_t open = 0;
  int32_t open_error = 0;
  uint32_t status_flags = 1u << 4;  // cuFile supports NVMe
  int32_t refuse_files = 0;
  bool refuse_buffers = false;
  uint32_t nvfs_major = 2;
  uint32_t feature_flags = 0;
  int32_t p2p_flags = 0;
  int32_t version = 1200;
  bool counts = true;                 // false: the library's statistics count no calls
  bool all_posix = false;             // all files are in compatibility mode, even if the driver's properties
                                      // say otherwise
  std::set<int> posix;                // descriptors of files in compatibility mode
  size_t posix_below = 0;             // calls of fewer bytes use POSIX I/O
  std::function<void()> before_move;  // each read or write calls this before it moves bytes
  int32_t level = 0;                  // level of detail of the library's statistics
  bool counting = false;
  uint64_t dma_ops = 0;
  uint64_t posix_ops = 0;
  std::set<int> files;
  std::map<const void*, size_t> buffers;
  int64_t registered = 0;    // number of buffers registered so far
  int64_t deregistered = 0;  // number of buffers deregistered so far
  size_t most_buffers = 0;   // maximum number of buffers registered at once; 0: no limit
  size_t set_pinned_kib = 0;
  bool set_while_open = false;
  uint32_t pinned_kib = 32u << 20;  // as reported in the driver's properties
  int64_t calls = 0;
  ssize_t next_answer = 0;  // if not 0, the next read or write returns this and moves no bytes
  int next_errno = 0;
};
inline FakeCufile fake;

inline ssize_t fake_move(CufileHandle handle, void* base, size_t bytes, off_t file_offset,
                         off_t buffer_offset, bool write) {
  if (fake.before_move) fake.before_move();
  const std::lock_guard lock(fake.mutex);
  fake.calls += 1;
  auto* memory = static_cast<char*>(base) + buffer_offset;
  CHECK(file_offset % 4096 == 0);
  CHECK(bytes % 4096 == 0);
  CHECK(reinterpret_cast<uintptr_t>(memory) % 4096 == 0);
  if (fake.next_answer != 0) {
    errno = fake.next_errno;
    const ssize_t answer = fake.next_answer;
    fake.next_answer = 0;
    return answer;
  }
  const int fd = static_cast<int>(reinterpret_cast<intptr_t>(handle));
  const ssize_t moved =
      write ? pwrite(fd, memory, bytes, file_offset) : pread(fd, memory, bytes, file_offset);
  if (moved > 0 && fake.counting && fake.counts) {
    const bool by_posix = fake.all_posix || fake.posix.contains(fd) || bytes < fake.posix_below;
    (by_posix ? fake.posix_ops : fake.dma_ops) += 1;
  }
  return moved;
}

// Writes the statistics of the third GPU. `version` decides at which offsets: those of cuFile 1.15 to 1.18,
// or those of 1.19 and 1.20.
inline CufileError fake_level3(void* out) {
  const std::lock_guard lock(fake.mutex);
  if (fake.level < 3) return {5022, 0};
  CufileGpuStatistics gpu{};
  gpu.nvfs_reads = fake.nvfs_major > 0 ? fake.dma_ops : 0;
  gpu.p2p_reads = fake.nvfs_major > 0 ? 0 : fake.dma_ops;
  gpu.posix_reads = fake.posix_ops;
  const size_t at = fake.version < 1190 ? 1032 : 1144;
  std::memcpy(static_cast<std::byte*>(out) + at + 2 * sizeof(gpu), &gpu, sizeof(gpu));
  return {};
}

inline CufileTable fake_table() {
  CufileTable table;
  table.driver_open = [] {
    if (fake.open_error == 0) fake.open += 1;
    return CufileError{fake.open_error, 0};
  };
  table.driver_close = [] {
    fake.open -= 1;
    return CufileError{};
  };
  table.driver_properties = [](CufileProperties* properties) {
    properties->nvfs.major_version = fake.nvfs_major;
    properties->feature_flags = fake.feature_flags;
    properties->nvfs.status_flags = fake.status_flags;
    properties->max_device_pinned_kib = fake.pinned_kib;
    return CufileError{};
  };
  table.handle_register = [](CufileHandle* handle, CufileDescription* description) {
    CHECK(description->type == 1);
    if (fake.refuse_files > 0) {
      fake.refuse_files -= 1;
      return CufileError{5008, 0};
    }
    fake.files.insert(description->file.fd);
    *handle = reinterpret_cast<CufileHandle>(static_cast<intptr_t>(description->file.fd));
    return CufileError{};
  };
  table.handle_deregister = [](CufileHandle handle) {
    CHECK(fake.files.erase(static_cast<int>(reinterpret_cast<intptr_t>(handle))) == 1);
  };
  table.buffer_register = [](const void* memory, size_t bytes, int) {
    const std::lock_guard lock(fake.mutex);
    if (fake.refuse_buffers) return CufileError{5011, 2};
    for (const auto& [other, size] : fake.buffers) {
      CHECK((static_cast<const char*>(memory) + bytes <= other ||
             static_cast<const char*>(other) + size <= memory));  // cuFile refuses registered memory
    }
    if (fake.most_buffers != 0 && fake.buffers.size() >= fake.most_buffers) return CufileError{5036, 0};
    fake.buffers[memory] = bytes;
    fake.registered += 1;
    return CufileError{};
  };
  table.buffer_deregister = [](const void* memory) {
    const std::lock_guard lock(fake.mutex);
    CHECK(fake.buffers.erase(memory) == 1);
    fake.deregistered += 1;
    return CufileError{};
  };
  table.read = [](CufileHandle handle, void* base, size_t bytes, off_t file_offset, off_t buffer_offset) {
    return fake_move(handle, base, bytes, file_offset, buffer_offset, false);
  };
  table.write = [](CufileHandle handle, const void* base, size_t bytes, off_t file_offset,
                   off_t buffer_offset) {
    return fake_move(handle, const_cast<void*>(base), bytes, file_offset, buffer_offset, true);
  };
  table.set_max_pinned_kib = [](size_t kib) {
    fake.set_pinned_kib = kib;
    fake.set_while_open = fake.open > 0;
    if (!fake.set_while_open) fake.pinned_kib = static_cast<uint32_t>(kib);
    return CufileError{};
  };
  table.version = [](int32_t* version) {
    *version = fake.version;
    return CufileError{};
  };
  if (fake.version < 1150) return table;
  table.p2p_flags = [](int32_t system, int32_t* flags) {
    *flags = system == 4 ? fake.p2p_flags : 0;
    return CufileError{system < 15 ? 0 : 5022, 0};
  };
  table.statistics.get_level = [](int32_t* level) {
    *level = fake.level;
    return CufileError{};
  };
  table.statistics.set_level = [](int32_t level) {
    fake.level = level;
    return CufileError{};
  };
  table.statistics.start = [] {
    fake.counting = true;
    return CufileError{};
  };
  table.statistics.stop = [] {
    fake.counting = false;
    return CufileError{};
  };
  table.statistics.level3 = &fake_level3;
  return table;
}

inline void reset_fake() {
  fake.open = fake.open_error = fake.refuse_files = 0;
  fake.status_flags = 1u << 4;
  fake.nvfs_major = 2;
  fake.feature_flags = 0;
  fake.p2p_flags = 0;
  fake.version = 1200;
  fake.counts = true;
  fake.all_posix = fake.counting = false;
  fake.posix.clear();
  fake.posix_below = 0;
  fake.before_move = nullptr;
  fake.level = 0;
  fake.dma_ops = fake.posix_ops = 0;
  fake.refuse_buffers = false;
  fake.files.clear();
  fake.buffers.clear();
  fake.registered = fake.deregistered = 0;
  fake.most_buffers = fake.set_pinned_kib = 0;
  fake.set_while_open = false;
  fake.pinned_kib = 32u << 20;
  fake.calls = 0;
  fake.next_answer = 0;
}

// A GdsWorld whose manager uses the fake libcufile.
struct CufileWorld {
  CufileWorld() { reset_world(); }
  void reset_world() {
    std::vector<std::vector<std::string>> paths;
    for (const char* disk : {"c0", "c1"}) paths.push_back({world.folder.file(disk)});
    files = std::make_shared<RawFiles>(paths);
    const auto device = host_transform_device();
    io = std::make_shared<CufileIo>(
        std::make_shared<Cufile>(fake_table()), files,
        std::make_shared<BouncedFileIo>(std::make_shared<PosixFileIo>(files), device));
    GdsOptions options;
    options.max_staging_blocks = 3;
    manager = std::make_unique<GDSManager>(files, options, device, io);
  }
  ~CufileWorld() {
    manager = nullptr;
    io = nullptr;
    CHECK(fake.open == 0);
    CHECK(fake.files.empty());
    CHECK(fake.buffers.empty());
  }
  TransferReport transfer(bool is_read) { return manager->transfer(*world.map, GdsWorld::pages(), is_read); }

  GdsWorld world;
  std::shared_ptr<RawFiles> files;
  std::shared_ptr<CufileIo> io;
  std::unique_ptr<GDSManager> manager;
};

// Fills each file, so that the first read of the file, from which the manager learns the file's route, finds
// bytes.
inline void fill_files(const CufileWorld& c, size_t bytes = 8192) {
  for (int32_t device = 0; device < c.files->devices(); ++device) {
    std::ofstream(c.files->at(device, 0).path) << std::string(bytes, 'x');
  }
}

}  // namespace flexkv
