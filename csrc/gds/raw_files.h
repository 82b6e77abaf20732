// The open files of a GDS manager, by device (disk).
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace flexkv {

using FilePaths = std::vector<std::vector<std::string>>;  // [device][file]

enum class OpenFiles { kCreate, kExisting };

class RawFiles {
 public:
  // Opens every file for reading and writing. With kCreate, missing files are created, and only this user may
  // access them. If the file system supports direct I/O, opens each file twice, because calls that are not 4
  // KiB-aligned need the page cache. Throws ConfigError if a file cannot be opened or is listed twice, or if
  // a device has no files.
  explicit RawFiles(const FilePaths& paths_by_device, OpenFiles how = OpenFiles::kCreate);
  ~RawFiles();
  RawFiles(const RawFiles&) = delete;
  RawFiles& operator=(const RawFiles&) = delete;

  struct File {
    std::string path;
    int direct_fd = -1;  // -1 if the file system refuses direct I/O
    int buffered_fd = -1;
  };
  int32_t devices() const { return static_cast<int32_t>(files_.size()); }
  const std::vector<File>& on(int32_t device) const { return files_[static_cast<size_t>(device)]; }
  FilePaths paths() const;
  // Precondition: the device and its file exist.
  const File& at(int32_t device, int64_t file) const { return on(device)[static_cast<size_t>(file)]; }

 private:
  void close_all();
  std::vector<std::vector<File>> files_;
};

}  // namespace flexkv
