// A manager's open files, by device.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace flexkv {

using FilePaths = std::vector<std::vector<std::string>>;  // by device

enum class OpenFiles { kCreate, kExisting };

class RawFiles {
 public:
  // Opens every file for reading and writing; kCreate makes missing ones, for this user alone. Opens each
  // file twice if the file system supports direct I/O, because calls that are not 4 KiB-aligned need the page
  // cache. Throws ConfigError, which names a file that cannot be opened or is given twice, or a device
  // without files.
  explicit RawFiles(const FilePaths& paths_by_device, OpenFiles how = OpenFiles::kCreate);
  ~RawFiles();
  RawFiles(const RawFiles&) = delete;
  RawFiles& operator=(const RawFiles&) = delete;

  struct File {
    std::string path;
    int direct_fd = -1;  // -1 if direct I/O is refused
    int buffered_fd = -1;
  };
  int32_t devices() const { return static_cast<int32_t>(files_.size()); }
  const std::vector<File>& on(int32_t device) const { return files_[static_cast<size_t>(device)]; }
  FilePaths paths() const;
  // Precondition: there is such a file.
  const File& at(int32_t device, int64_t file) const { return on(device)[static_cast<size_t>(file)]; }

 private:
  void close_all();
  std::vector<std::vector<File>> files_;
};

}  // namespace flexkv
