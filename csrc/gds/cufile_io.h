// File I/O directly between disks and GPU memory, with cuFile's synchronous calls.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "gds/cufile_shim.h"
#include "gds/file_io.h"
#include "gds/raw_files.h"

namespace flexkv {

class CufileIo : public FileIo {
 public:
  // Registers every file once with cuFile. `fallback` serves the files that cuFile refuses. It also serves
  // calls whose file offset, length or address is not 4 KiB-aligned: cuFile would copy the bytes of such
  // calls through a buffer of its own without reporting it.
  CufileIo(std::shared_ptr<Cufile> cufile, std::shared_ptr<const RawFiles> files,
           std::shared_ptr<FileIo> fallback);
  ~CufileIo() override;
  CufileIo(const CufileIo&) = delete;
  CufileIo& operator=(const CufileIo&) = delete;

  // Describes the routes of calls on the files, as far as cuFile's statistics have shown them. If calls on
  // some files are bounced (copied through another buffer), the description includes the path of one of these
  // files.
  std::string name() const override;
  IoOutcome transfer(const IoCall& call) override;
  // Returns kDirect only if the memory is registered and the last observed calls on the file were direct.
  IoRoute route(const IoCall& call) const override;
  std::string direct_refusal() const override;
  // For each file whose route is not known yet, returns a call that reads from the start of the file. Returns
  // no calls if cuFile does not count its calls.
  std::vector<IoCall> looks(void* memory, int64_t bytes) const override;
  Registering registering() const override;
  std::string add_memory(void* memory, int64_t bytes) override;
  void remove_memory(void* memory) override;
  // Why a file is not registered with cuFile; empty if it is.
  const std::string& refused(int32_t device, int64_t file) const { return entry(device, file).refused; }

 private:
  struct Entry {
    CufileHandle handle = nullptr;
    std::string refused;
    CufileWatch::Route route;
  };
  struct Place {
    std::byte* base;
    int64_t offset;
    bool registered;
  };
  // The number of files whose calls take each route. `bounced` describes the first file whose calls are
  // bounced, with the reason; it is empty if there is none.
  struct Summary {
    int64_t files = 0;
    int64_t direct = 0;
    int64_t unknown = 0;
    std::string bounced;
  };
  const Entry& entry(int32_t device, int64_t file) const {
    return entries_[static_cast<size_t>(device)][static_cast<size_t>(file)];
  }
  Place place(void* memory, int64_t bytes) const;
  // Makes one call to cuFile and observes its route. Then updates `route`, the common route of the transfer's
  // calls so far.
  ssize_t call_cufile(const Entry& file, const Place& where, bool write, size_t bytes, off_t offset,
                      off_t in_buffer, std::optional<IoRoute>& route) const;
  Summary summary() const;
  std::string why_unknown() const;

  std::shared_ptr<Cufile> cufile_;
  std::shared_ptr<const RawFiles> files_;
  std::shared_ptr<FileIo> fallback_;
  std::vector<std::vector<Entry>> entries_;
  mutable std::mutex mutex_;
  std::map<std::byte*, int64_t> registered_;          // base address -> size in bytes
  std::map<std::byte*, std::string> not_registered_;  // base address -> why cuFile refused the memory
};

}  // namespace flexkv
