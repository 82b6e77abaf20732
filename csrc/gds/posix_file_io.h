// File I/O with pread and pwrite, from and to plain memory.
#pragma once
#include <memory>

#include "gds/file_io.h"
#include "gds/raw_files.h"

namespace flexkv {

// Makes the calls with pread and pwrite. Uses direct I/O if a call's file offset, length and address are 4
// KiB-aligned and the file system supports direct I/O. Otherwise it uses the page cache, which route()
// reports as bounced.
class PosixFileIo : public FileIo {
 public:
  explicit PosixFileIo(std::shared_ptr<const RawFiles> files) : files_(std::move(files)) {}
  std::string name() const override { return "posix"; }
  IoOutcome transfer(const IoCall& call) override;
  IoRoute route(const IoCall& call) const override;
  std::string add_memory(void*, int64_t) override { return {}; }
  void remove_memory(void*) override {}

 private:
  std::shared_ptr<const RawFiles> files_;
};

// Whether the call's file offset, length and address are all 4 KiB-aligned.
bool is_aligned(const IoCall& call);

}  // namespace flexkv
