#include "gds/cufile_io.h"

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <system_error>

#include "base/align.h"
#include "gds/posix_file_io.h"

namespace flexkv {
namespace {

// Unit: bytes. The maximum length of a probing read of looks(). It is far larger than `posix_gds_min_kb`, the
// size below which cuFile makes POSIX calls.
constexpr int64_t kLookBytes = int64_t{1} << 20;

// Describes an error code (CUfileOpError) that cuFileBufRegister returned for memory of the inference
// engine's pool.
std::string register_words(int32_t code) {
  switch (code) {
    case 5013:
      return " (memory that neither cudaMalloc nor cuMemAlloc has made)";
    case 5014:
      return " (beyond the end of an allocation)";
    case 5016:
    case 5036:
      return " (more than can be pinned: cuFile's limit, or the GPU's BAR1)";
    default:
      return {};
  }
}

}  // namespace

CufileIo::CufileIo(std::shared_ptr<Cufile> cufile, std::shared_ptr<const RawFiles> files,
                   std::shared_ptr<FileIo> fallback)
    : cufile_(std::move(cufile)), files_(std::move(files)), fallback_(std::move(fallback)) {
  for (int32_t device = 0; device < files_->devices(); ++device) {
    entries_.emplace_back();
    for (const RawFiles::File& file : files_->on(device)) {
      Entry entry;
      entry.route = std::make_shared<std::atomic<IoRoute>>(cufile_->direct_by().empty() ? IoRoute::kBounced
                                                                                        : IoRoute::kUnknown);
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

CufileIo::Summary CufileIo::summary() const {
  Summary found;
  for (size_t device = 0; device < entries_.size(); ++device) {
    for (size_t file = 0; file < entries_[device].size(); ++file) {
      const Entry& entry = entries_[device][file];
      const IoRoute route = entry.refused.empty() ? entry.route->load() : IoRoute::kBounced;
      found.files += 1;
      if (route == IoRoute::kDirect) found.direct += 1;
      if (route == IoRoute::kUnknown) found.unknown += 1;
      if (route != IoRoute::kBounced || !found.bounced.empty()) continue;
      const std::string& path = files_->on(static_cast<int32_t>(device))[file].path;
      found.bounced = entry.refused.empty() ? path + " by POSIX calls inside cuFile"
                                            : path + " by " + fallback_->name() + " (" + entry.refused + ")";
    }
  }
  return found;
}

std::string CufileIo::why_unknown() const {
  return cufile_->uncounted().empty() ? "none of its calls has been seen" : cufile_->uncounted();
}

std::string CufileIo::name() const {
  const Summary found = summary();
  const std::string ways =
      cufile_->direct_by().empty() ? std::string("no kernel driver") : cufile_->direct_by();
  const auto of_files = [&](int64_t count) {
    return std::to_string(count) + " of " + std::to_string(found.files) + " files";
  };
  std::string text;
  if (found.direct == found.files) {
    text = "cuFile, GPUDirect Storage (" + ways + ")";
  } else if (found.direct == 0 && found.unknown == 0) {
    text = kCufileCompat;
  } else {
    text = "cuFile: " + of_files(found.direct) + " by GPUDirect Storage, " + ways;
  }
  if (found.unknown > 0) text += ", " + of_files(found.unknown) + " not known: " + why_unknown();
  if (!found.bounced.empty()) text += "; " + found.bounced;
  {
    const std::lock_guard lock(mutex_);
    if (!not_registered_.empty()) text += "; staging is bounced: " + not_registered_.begin()->second;
  }
  const CufileCalls calls = cufile_->watch().calls();
  if (calls.direct + calls.bounced > 0) {
    text += "; this process: " + std::to_string(calls.direct) + " calls direct, " +
            std::to_string(calls.bounced) + " bounced, " + std::to_string(calls.unknown) + " not known";
  }
  return text;
}

std::string CufileIo::direct_refusal() const {
  const Summary found = summary();
  if (found.direct + found.unknown == 0) return name();
  const std::lock_guard lock(mutex_);
  return registered_.empty() && !not_registered_.empty() ? not_registered_.begin()->second : std::string();
}

IoRoute CufileIo::route(const IoCall& call) const {
  const Entry& file = entry(call.device, call.file);
  if (!file.refused.empty() || !is_aligned(call)) return IoRoute::kBounced;
  if (!place(call.memory, call.bytes).registered) return IoRoute::kBounced;
  return file.route->load();
}

CufileIo::Place CufileIo::place(void* memory, int64_t bytes) const {
  auto* at = static_cast<std::byte*>(memory);
  const std::lock_guard lock(mutex_);
  auto next = registered_.upper_bound(at);
  if (next != registered_.begin()) {
    const auto& [base, size] = *std::prev(next);
    if (at + bytes <= base + size) return {base, at - base, true};
  }
  return {at, 0, false};  // cuFile accepts unregistered memory, but copies through its own buffers
}

ssize_t CufileIo::call_cufile(const Entry& file, const Place& where, bool write, size_t bytes, off_t offset,
                              off_t in_buffer, std::optional<IoRoute>& route) const {
  CufileWatch& watch = cufile_->watch();
  const std::optional<CufileOps> before = watch.begin();
  errno = 0;
  const ssize_t moved = write ? cufile_->table().write(file.handle, where.base, bytes, offset, in_buffer)
                              : cufile_->table().read(file.handle, where.base, bytes, offset, in_buffer);
  const int error = errno;
  const IoRoute seen = watch.end(before, where.registered ? file.route : nullptr, moved > 0);
  errno = error;
  if (!route || (moved > 0 && *route == IoRoute::kDirect) || seen == IoRoute::kBounced) route = seen;
  return moved;
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
    const ssize_t moved = call_cufile(file, where, call.write, left, offset, in_buffer, outcome.route);
    // If cuFile returns -1, a system call failed and errno has its error, so the cause is the disk. Other
    // negative numbers are errors of cuFile, its driver or CUDA.
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

Registering CufileIo::registering() const {
  Registering needs{true, summary().direct > 0, {}, {}};
  if (cufile_->direct_by().empty()) needs.refusal = kCufileCompat;
  if (cufile_->pinned_limit() > 0) {
    const std::lock_guard lock(mutex_);
    int64_t pinned = 0;
    for (const auto& [base, bytes] : registered_) pinned += bytes;
    needs.most_bytes = std::max<int64_t>(0, cufile_->pinned_limit() - pinned);
  }
  return needs;
}

std::string CufileIo::add_memory(void* memory, int64_t bytes) {
  const CufileError error = cufile_->table().buffer_register(memory, static_cast<size_t>(bytes), 0);
  {
    const std::lock_guard lock(mutex_);
    auto* base = static_cast<std::byte*>(memory);
    if (error.code != 0) {
      return not_registered_[base] = "cuFileBufRegister: " + to_string(error) + register_words(error.code);
    }
    not_registered_.erase(base);
    registered_[base] = bytes;
  }
  return {};
}

std::vector<IoCall> CufileIo::looks(void* memory, int64_t bytes) const {
  std::vector<IoCall> calls;
  const int64_t most = std::min(bytes, kLookBytes) / kIoAlignBytes * kIoAlignBytes;
  if (most == 0 || !cufile_->uncounted().empty()) return calls;
  for (size_t device = 0; device < entries_.size(); ++device) {
    for (size_t file = 0; file < entries_[device].size(); ++file) {
      const Entry& of = entries_[device][file];
      if (!of.refused.empty() || of.route->load() != IoRoute::kUnknown) continue;
      calls.push_back({false, static_cast<int32_t>(device), static_cast<int64_t>(file), 0, memory, most});
    }
  }
  return calls;
}

void CufileIo::remove_memory(void* memory) {
  {
    const std::lock_guard lock(mutex_);
    auto* base = static_cast<std::byte*>(memory);
    not_registered_.erase(base);
    if (registered_.erase(base) == 0) return;
  }
  cufile_->table().buffer_deregister(memory);
}

}  // namespace flexkv
