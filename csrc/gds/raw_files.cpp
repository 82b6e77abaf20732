#include "gds/raw_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <set>
#include <system_error>
#include <utility>

#include "base/direct_io.h"
#include "base/error.h"
#include "base/path_check.h"

namespace flexkv {
namespace {

// The files contain callers' KV, so no other user may read them.
constexpr mode_t kFileMode = 0600;

[[noreturn]] void refuse(const std::string& path, const char* what, int error) {
  throw ConfigError(std::string(what) + " '" + path + "': " + std::generic_category().message(error));
}

}  // namespace

RawFiles::RawFiles(const FilePaths& paths_by_device, OpenFiles how) {
  const int create = how == OpenFiles::kCreate ? O_CREAT : 0;
  if (paths_by_device.empty()) throw ConfigError("no device with files was given");
  std::set<std::pair<dev_t, ino_t>> seen;
  try {
    for (size_t device = 0; device < paths_by_device.size(); ++device) {
      if (paths_by_device[device].empty()) {
        throw ConfigError("device " + std::to_string(device) + " has no files");
      }
      files_.emplace_back();
      for (const std::string& path : paths_by_device[device]) {
        require_no_nul<ConfigError>(path);
        files_.back().push_back({path, -1, -1});
        File& file = files_.back().back();
        file.buffered_fd = open(path.c_str(), O_RDWR | create | O_CLOEXEC, kFileMode);
        if (file.buffered_fd < 0) refuse(path, "cannot open", errno);
        struct stat found{};
        if (fstat(file.buffered_fd, &found) != 0) refuse(path, "cannot examine", errno);
        if (!S_ISREG(found.st_mode)) throw ConfigError("'" + path + "' is not a regular file");
        if (!seen.emplace(found.st_dev, found.st_ino).second) {
          throw ConfigError("'" + path + "' is given twice, perhaps under another name");
        }
        file.direct_fd = open(path.c_str(), O_RDWR | O_CLOEXEC | O_DIRECT);
        // EINVAL means that the file system does not support direct I/O. Any other error concerns only this
        // file.
        if (file.direct_fd < 0 && errno != EINVAL) refuse(path, "cannot open for direct I/O", errno);
        if (file.direct_fd >= 0 && !direct_io_refusal(file.direct_fd).empty()) {
          close(file.direct_fd);
          file.direct_fd = -1;
        }
      }
    }
  } catch (...) {
    close_all();
    throw;
  }
}

RawFiles::~RawFiles() { close_all(); }

void RawFiles::close_all() {
  for (const auto& device : files_) {
    for (const File& file : device) {
      for (const int fd : {file.direct_fd, file.buffered_fd}) {
        if (fd >= 0) close(fd);
      }
    }
  }
  files_.clear();
}

FilePaths RawFiles::paths() const {
  FilePaths paths;
  for (const auto& device : files_) {
    paths.emplace_back();
    for (const File& file : device) paths.back().push_back(file.path);
  }
  return paths;
}

}  // namespace flexkv
