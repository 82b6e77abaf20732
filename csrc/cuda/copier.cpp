#include "cuda/copier.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cuda/copy_trial.h"
#include "cuda/copy_ways.h"

namespace flexkv::cuda {
namespace {

constexpr const char* kWaitKernel = "the kernel that waits for a layer";

// An event that is reached when a kernel has copied a stage. A stream may still be waiting for the event when
// the memory with the word `passed` is freed. This is safe: in all known drivers, cuMemFree blocks until the
// wait has ended. The wait does end, because the copy kernel has ended by then.
class StagePoint : public StreamEvent {
 public:
  StagePoint(std::shared_ptr<Copier> copier, const uint32_t* passed, uint32_t value)
      : copier_(std::move(copier)), passed_(passed), value_(value) {}

  std::string make_wait(StreamId stream) override { return copier_->wait(passed_, value_, stream); }
  // The host cannot read the word, which is in device memory. So reached() returns true, as for any event
  // whose state is unknown.
  bool reached() override { return true; }

 private:
  const std::shared_ptr<Copier> copier_;
  const uint32_t* const passed_;
  const uint32_t value_;
};

}  // namespace

std::vector<std::shared_ptr<StreamEvent>> stage_points(const std::shared_ptr<Copier>& copier,
                                                       CopyStream& stream, int32_t stages) {
  // This call must come first: the kernel counts all stages even if an allocation below fails.
  uint32_t passed = stream.count_stages(stages);
  std::vector<std::shared_ptr<StreamEvent>> points;
  for (int32_t stage = 0; stage < stages; ++stage) {
    points.push_back(std::make_shared<StagePoint>(copier, stream.stage_words().passed, ++passed));
  }
  return points;
}

Copier::Copier(std::shared_ptr<Device> device, CopyKernels kernels, const CopySwitches& switches)
    : device_(std::move(device)), kernels_(kernels) {
  capabilities_.measured_below = switches.measured_below;
  if (!switches.batch) {
    note("batched copies are switched off");
  } else if (!device_->driver().has_batch()) {
    note("no batched copies: the driver is older than CUDA 12.8");
  } else {
    const std::string failure = try_path(Path::kBatch);
    capabilities_.batch = failure.empty();
    if (!failure.empty()) note("no batched copies: self-test: " + failure);
  }
  if (!switches.kernel) {
    note("the copy kernel is switched off");
  } else if (kernels_.copy == nullptr) {
    note("no copy kernel: built without CUDA");
  } else if (!device_->host_addresses_work()) {
    note("no copy kernel: the device has other addresses for host memory");
  } else {
    // If the kernel was built for other devices or for a newer driver, these calls fail, because they are the
    // first that need the kernel's image.
    std::string failure = kernels_.load == nullptr ? std::string() : kernels_.load();
    if (failure.empty()) failure = try_path(Path::kKernel);
    capabilities_.kernel = failure.empty();
    capabilities_.stage_words = failure.empty() && kernels_.wait != nullptr;
    if (!failure.empty()) note("no copy kernel: self-test: " + failure);
  }
}

std::string Copier::try_path(Path path) {
  return try_copies(device_,
                    [this, path](Direction direction, auto segments, auto pages, CopyStream& stream) {
                      if (path == Path::kKernel) {
                        const std::string failure =
                            by_kernel(direction, segments, pages, stream, {}).value_or("no room for tables");
                        if (!failure.empty() || kernels_.wait == nullptr) return failure;
                        return kernels_.wait(stream.stage_words().passed, 0, stream.handle());
                      }
                      std::vector<Copy> copies;
                      CopyLister(segments, pages, INT64_MAX).next(kPortionBytes[0], kPortionCopies, copies);
                      return by_batch(direction, copies, stream);
                    });
}

Capabilities Copier::capabilities() const {
  const std::lock_guard lock(mutex_);
  return capabilities_;
}

std::string Copier::notes() const {
  const std::lock_guard lock(mutex_);
  return notes_;
}

void Copier::note(const std::string& text) {
  const std::lock_guard lock(mutex_);
  notes_ += (notes_.empty() ? "" : "; ") + text;
}

// Stops using the kernel that `means` selects, because the kernel could not be started. notes() then includes
// `why`.
void Copier::give_up(bool Capabilities::* means, const std::string& why) {
  const bool copies = means == &Capabilities::kernel;
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(capabilities_.*means, false)) {
      notes_ += std::string(notes_.empty() ? "" : "; ") + (copies ? "the copy kernel" : kWaitKernel) +
                " is not used any more, " + why;
    }
  }
  ++failed_launches_;  // incremented last, so that a thread that sees the new count also finds the note
}

std::string Copier::wait(const uint32_t* passed, uint32_t value, StreamId stream) {
  if (!capabilities().stage_words) return std::string(kWaitKernel) + " is not used any more";
  std::string error = kernels_.wait(passed, value, reinterpret_cast<void*>(stream));
  if (!error.empty()) {
    give_up(&Capabilities::stage_words,
            "loads by layer are launched layer by layer, and those in flight are waited for on the host: " +
                error);
  }
  return error;
}

PathCount Copier::count(Path path) const {
  const Cell& cell = counts_[static_cast<size_t>(path)];
  return {cell.pieces, cell.bytes, cell.calls};
}

void Copier::add(Path path, int64_t bytes, int64_t calls) {
  Cell& cell = counts_[static_cast<size_t>(path)];
  ++cell.pieces;
  cell.bytes += bytes;
  cell.calls += calls;
}

bool Copier::launch(Direction direction, std::span<const Segment> segments, std::span<const PageEnds> pages,
                    CopyStream& stream, std::span<const size_t> stages) {
  if (!capabilities().kernel) return false;
  const std::optional<std::string> failure = by_kernel(direction, segments, pages, stream, stages);
  if (!failure) return false;
  if (!failure->empty()) {
    give_up(&Capabilities::kernel, "its runs go by the copy engine, slower: " + *failure);
    return false;
  }
  int64_t bytes = 0;
  for (const Segment& segment : segments) bytes += segment.run_bytes;
  add(Path::kKernel, bytes * static_cast<int64_t>(pages.size()), 1);
  return true;
}

std::optional<std::string> Copier::by_kernel(Direction direction, std::span<const Segment> segments,
                                             std::span<const PageEnds> pages, CopyStream& stream,
                                             std::span<const size_t> stages) const {
  const size_t whole[] = {segments.size()};
  std::vector<CopyChunk> chunks;
  std::vector<int32_t> stage_ends;
  size_t begin = 0;
  for (const size_t end : stages.empty() ? std::span<const size_t>(whole) : stages) {
    const std::vector<CopyChunk> cut = cut_to_chunks(segments.data() + begin, end - begin);
    chunks.insert(chunks.end(), cut.begin(), cut.end());
    stage_ends.push_back(static_cast<int32_t>(chunks.size()));
    begin = end;
  }
  const size_t chunk_bytes = chunks.size() * sizeof(CopyChunk), page_bytes = pages.size() * sizeof(CopyPage);
  const size_t stage_bytes = stage_ends.size() > 1 ? stage_ends.size() * sizeof(int32_t) : 0;
  const size_t bytes = chunk_bytes + page_bytes + stage_bytes;
  const auto tables = stream.reserve(bytes);
  if (!tables) return std::nullopt;
  std::memcpy(tables->host, chunks.data(), chunk_bytes);
  for (size_t i = 0; i < pages.size(); ++i) {
    const CopyPage page{pages[i].block, reinterpret_cast<uintptr_t>(pages[i].stripe)};
    std::memcpy(tables->host + chunk_bytes + i * sizeof(CopyPage), &page, sizeof(page));
  }
  std::memcpy(tables->host + chunk_bytes + page_bytes, stage_ends.data(), stage_bytes);
  CopyJob job;
  if (!stages.empty()) job.words = stream.stage_words();
  job.stage_count = static_cast<int32_t>(stage_ends.size());
  job.chunk_count = static_cast<int32_t>(chunks.size());
  job.page_count = static_cast<int32_t>(pages.size());
  job.to_device = direction == Direction::kToDevice;
  job.stop = reinterpret_cast<const uint32_t*>(static_cast<uintptr_t>(stream.stop_word()));
  job.number = stream.next_mark();
  const int most =
      std::min(kKernelMultiprocessors[static_cast<size_t>(direction)], device_->multiprocessors());
  if (bytes <= kTablesInLaunch) return kernels_.copy(job, {tables->host, bytes}, most, stream.handle());
  if (std::string error = stream.send(*tables, bytes); !error.empty()) return error;
  job = with_tables(job, reinterpret_cast<const void*>(static_cast<uintptr_t>(tables->device)));
  return kernels_.copy(job, {}, most, stream.handle());
}

std::string Copier::copy(Direction direction, std::span<const Copy> copies, bool registered,
                         CopyStream& stream) {
  if (copies.empty()) return {};
  int64_t bytes = 0;
  for (const Copy& one : copies) bytes += static_cast<int64_t>(one.bytes);
  // Single copy calls accept pageable memory; the driver then copies it through a buffer of its own. NVIDIA
  // does not document whether batched calls accept pageable memory, too.
  const bool batch = copies.size() > 1 && registered && capabilities().batch;
  std::string error = batch ? by_batch(direction, copies, stream) : std::string();
  for (size_t i = 0; !batch && error.empty() && i < copies.size(); ++i) {
    error = single(direction, copies[i], stream);
  }
  if (!error.empty()) return error;
  add(batch ? Path::kBatch : Path::kSingle, bytes, batch ? 1 : static_cast<int64_t>(copies.size()));
  return {};
}

std::string Copier::single(Direction direction, const Copy& copy, CopyStream& stream) const {
  const Driver& driver = device_->driver();
  const bool to_device = direction == Direction::kToDevice;
  const Code code = to_device ? driver.copy_to_device(copy.device, copy.host, copy.bytes, stream.handle())
                              : driver.copy_to_host(copy.host, copy.device, copy.bytes, stream.handle());
  return driver.failure(code, to_device ? "cuMemcpyHtoDAsync" : "cuMemcpyDtoHAsync");
}

std::string Copier::by_batch(Direction direction, std::span<const Copy> copies, CopyStream& stream) const {
  std::array<DeviceAddress, kPortionCopies> dsts, srcs;
  std::array<size_t, kPortionCopies> sizes;
  const bool to_device = direction == Direction::kToDevice;
  for (size_t i = 0; i < copies.size(); ++i) {
    const auto host = static_cast<DeviceAddress>(reinterpret_cast<uintptr_t>(copies[i].host));
    const auto device = static_cast<DeviceAddress>(copies[i].device);
    dsts[i] = to_device ? device : host;
    srcs[i] = to_device ? host : device;
    sizes[i] = copies[i].bytes;
  }
  BatchAttributes attributes;
  // A page to be loaded is complete in host memory before its op starts, so the driver may read it at any
  // time. The source of a store is written by work that the stream waits for, so the driver must read it in
  // stream order.
  attributes.order = to_device ? SourceOrder::kAny : SourceOrder::kStream;
  size_t first = 0;  // the attributes apply to all copies, because they apply from copy 0 on
  const Driver& driver = device_->driver();
  Code code = kSuccess;
  if (driver.batch_13000 != nullptr) {
    code = driver.batch_13000(dsts.data(), srcs.data(), sizes.data(), copies.size(), &attributes, &first, 1,
                              stream.handle());
  } else {
    size_t failed = SIZE_MAX;
    code = driver.batch_12080(dsts.data(), srcs.data(), sizes.data(), copies.size(), &attributes, &first, 1,
                              &failed, stream.handle());
  }
  return driver.failure(code, "cuMemcpyBatchAsync");
}

}  // namespace flexkv::cuda
