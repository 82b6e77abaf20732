#include "gds/cufile_io.h"

#include <cerrno>
#include <iterator>
#include <system_error>

#include "gds/posix_file_io.h"

namespace flexkv {

CufileIo::CufileIo(std::shared_ptr<Cufile> cufile, std::shared_ptr<const RawFiles> files,
                   std::shared_ptr<FileIo> fallback)
    : cufile_(std::move(cufile)), files_(std::move(files)), fallback_(std::move(fallback)) {
  for (int32_t device = 0; device < files_->devices(); ++device) {
    entries_.emplace_back();
    for (const RawFiles::File& file : files_->on(device)) {
      Entry entry;
      if (file.direct_fd < 0) {
        entry.refused = "no direct I/O on its file system";
      } else {
        CufileDescription description;
        description.file.fd = file.direct_fd;
        const CufileError error = cufile_->table().handle_register(&entry.handle, &description);
        if (error.code != 0) entry.refused = "cuFileHandleRegister: " + to_string(error);
      }
      entries_.back().push_back(std::move(entry));
    }
  }
}

CufileIo::~CufileIo() {
  for (const auto& [base, bytes] : registered_) cufile_->table().buffer_deregister(base);
  for (const auto& device : entries_) {
    for (const Entry& entry : device) {
      if (entry.refused.empty()) cufile_->table().handle_deregister(entry.handle);
    }
  }
}

std::string CufileIo::name() const {
  std::string text = cufile_->describe();
  for (size_t device = 0; device < entries_.size(); ++device) {
    for (size_t file = 0; file < entries_[device].size(); ++file) {
      if (entries_[device][file].refused.empty()) continue;
      return text + "; " + files_->on(static_cast<int32_t>(device))[file].path + " by " + fallback_->name() +
             " (" + entries_[device][file].refused + ")";
    }
  }
  return text;
}

IoRoute CufileIo::route(const IoCall& call) const {
  if (!entry(call.device, call.file).refused.empty()) return IoRoute::kBounced;
  return is_aligned(call) && cufile_->mode() == CufileMode::kDirect ? IoRoute::kDirect : IoRoute::kBounced;
}

CufileIo::Place CufileIo::place(void* memory, int64_t bytes) const {
  auto* at = static_cast<std::byte*>(memory);
  const std::lock_guard lock(mutex_);
  auto next = registered_.upper_bound(at);
  if (next != registered_.begin()) {
    const auto& [base, size] = *std::prev(next);
    if (at + bytes <= base + size) return {base, at - base};
  }
  return {at, 0};  // not registered: cuFile takes it, through its own buffers
}

IoOutcome CufileIo::transfer(const IoCall& call) {
  const Entry& file = entry(call.device, call.file);
  if (!file.refused.empty() || !is_aligned(call)) return fallback_->transfer(call);
  const Place where = place(call.memory, call.bytes);
  IoOutcome outcome;
  while (outcome.bytes < call.bytes) {
    const auto left = static_cast<size_t>(call.bytes - outcome.bytes);
    const auto offset = static_cast<off_t>(call.offset + outcome.bytes);
    const auto in_buffer = static_cast<off_t>(where.offset + outcome.bytes);
    errno = 0;
    const ssize_t moved = call.write
                              ? cufile_->table().write(file.handle, where.base, left, offset, in_buffer)
                              : cufile_->table().read(file.handle, where.base, left, offset, in_buffer);
    // -1 leaves the system's error in errno, the disk's; other negative numbers are cuFile's own, of its
    // driver or of CUDA.
    if (moved == -1) {
      outcome.error = errno != 0 ? std::generic_category().message(errno) : "cuFile failed without a reason";
      break;
    }
    if (moved < 0) {
      outcome.error = to_string(CufileError{static_cast<int32_t>(-moved), 0});
      outcome.of_memory = true;
      break;
    }
    if (moved == 0) break;
    if (static_cast<size_t>(moved) > left) {
      outcome.error =
          "cuFile says that it moved " + std::to_string(moved) + " of " + std::to_string(left) + " bytes";
      outcome.of_memory = true;
      break;
    }
    outcome.bytes += moved;
  }
  return outcome;
}

std::string CufileIo::add_memory(void* memory, int64_t bytes) {
  const CufileError error = cufile_->table().buffer_register(memory, static_cast<size_t>(bytes), 0);
  if (error.code != 0) return "cuFileBufRegister: " + to_string(error);
  const std::lock_guard lock(mutex_);
  registered_[static_cast<std::byte*>(memory)] = bytes;
  return {};
}

void CufileIo::remove_memory(void* memory) {
  {
    const std::lock_guard lock(mutex_);
    if (registered_.erase(static_cast<std::byte*>(memory)) == 0) return;
  }
  cufile_->table().buffer_deregister(memory);
}

}  // namespace flexkv
