#include "cuda/copier.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <optional>
#include <utility>

#include "base/error.h"
#include "cuda/event.h"

namespace flexkv::cuda {
namespace {

// Unit: bytes. Of a table at the start: for 8,000 runs of a page, fifty times what 80 layers of K and V have.
// Allocating more later may wait for other streams.
constexpr size_t kTableBytes = 256 << 10;

// Rows that a call must have on the mean to be used where there are batches, which take irregular copies too.
constexpr size_t kLeastRows = 4;

size_t table_bytes(std::span<const CopyChunk> chunks, std::span<const PageEnds> pages) {
  return chunks.size_bytes() + pages.size() * sizeof(CopyPage);
}

}  // namespace

// Pinned memory for the tables of one piece under way; the kernel reads it over the link, which for tables of
// some kilobytes is cheaper than a copy. What it outgrows is freed at the end only: a free waits for the
// whole device, the engine's work included.
struct Copier::Staging {
  explicit Staging(std::shared_ptr<Device> owner) : device(std::move(owner)) {}
  ~Staging() {
    const QuietCurrent here(*device);
    for (void* one : allocated) device->driver().host_free(one);
  }
  std::string reserve(size_t wanted) {
    if (wanted <= bytes) return {};
    // Twice as much each time: all that was outgrown is less than what is in use.
    const size_t grown = std::max({wanted, 2 * bytes, kTableBytes});
    const Driver& driver = device->driver();
    void* grown_memory = nullptr;
    const Code code = driver.host_alloc(&grown_memory, grown, kHostAllocPortable | kHostAllocDeviceMap);
    if (code != kSuccess) return driver.error_text(code, "cuMemHostAlloc");
    allocated.push_back(grown_memory);
    memory = grown_memory;
    bytes = grown;
    return {};
  }

  const std::shared_ptr<Device> device;
  std::vector<void*> allocated;
  void* memory = nullptr;
  size_t bytes = 0;
};

Copier::Copier(std::shared_ptr<Device> device, KernelLauncher launcher, const CopySwitches& switches)
    : device_(std::move(device)), launcher_(launcher) {
  capabilities_.max_pitch_bytes = device_->max_pitch();
  for (auto& staging : stagings_) staging = std::make_unique<Staging>(device_);
  if (!switches.batch) {
    note("batched copies are switched off");
  } else if (!device_->driver().has_batch()) {
    note("no batched copies: the driver is older than CUDA 12.8");
  } else {
    const std::string failure = try_copies(device_, mover_of(Path::kBatch));
    capabilities_.batch = failure.empty();
    if (!failure.empty()) note("no batched copies: self-test: " + failure);
  }
  if (!switches.kernel) {
    note("the copy kernel is switched off");
  } else if (launcher_ == nullptr) {
    note("no copy kernel: built without CUDA");
  } else if (!device_->host_addresses_work()) {
    note("no copy kernel: the device has other addresses for host memory");
  } else {
    for (auto& staging : stagings_) {
      if (const std::string error = staging->reserve(kTableBytes); !error.empty()) throw CapacityError(error);
    }
    // A build for other devices, or for a later driver, shows here: a launch is the first that needs its
    // image.
    const std::string failure = try_copies(device_, mover_of(Path::kKernel));
    capabilities_.kernel = failure.empty();
    if (!failure.empty()) note("no copy kernel: self-test: " + failure);
  }
  for (Measured& direction : measured_) direction.ways = usual_ways(capabilities_);
  if (switches.measure) measure();
}

Copier::~Copier() = default;

Mover Copier::mover_of(Path path) {
  return [this, path, staging = 0](Direction direction, auto segments, auto pages,
                                   StreamHandle stream) mutable -> std::string {
    if (path == Path::kKernel) {
      const std::vector<CopyChunk> chunks = cut_to_chunks(segments.data(), segments.size());
      staging = (staging + 1) % kStagings;
      return by_kernel(direction, chunks, pages, tables_of(direction, staging), stream);
    }
    const std::vector<Copy> copies = list_copies(segments, pages);
    int64_t calls = 0;
    if (path == Path::kBatch) return by_batch(direction, copies, stream, calls);
    const size_t pitch = path == Path::kPitched ? capabilities_.max_pitch_bytes : 0;
    return by_rows(direction, group_rows(copies, pitch), stream, calls);
  };
}

// Whatever goes wrong: what was not measured goes by the constants.
void Copier::measure() {
  if (capabilities_.max_pitch_bytes > 0) {
    if (const std::string failure = try_copies(device_, mover_of(Path::kPitched)); !failure.empty()) {
      capabilities_.max_pitch_bytes = 0;
      note("no copies of rows: self-test: " + failure);
    }
  }
  try {
    CopyClock clock(device_);
    for (const Direction direction : {Direction::kToDevice, Direction::kToHost}) {
      Measured& measured = measured_[static_cast<size_t>(direction)];
      const double link_s = clock.runs_s(direction, kMostMeasuredBytes, 1, mover_of(Path::kSingle));
      if (link_s > 0) measured.link_rate = static_cast<double>(kMostMeasuredBytes) / link_s;
      const auto time = [&](Path path, int64_t run_bytes, int64_t runs) {
        return clock.runs_s(direction, run_bytes, runs, mover_of(path));
      };
      const auto ways = link_s > 0 ? measured_ways(capabilities_, time) : std::nullopt;
      if (ways) {
        measured.ways = *ways;
      } else {
        note(std::string("copies to the ") + (direction == Direction::kToDevice ? "device" : "host") +
             " could not be timed");
      }
    }
  } catch (const std::exception& error) {
    note(std::string("copies were not measured: ") + error.what());
  }
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

void Copier::give_up_kernel(const std::string& why) {
  ++failed_launches_;
  {
    const std::lock_guard lock(mutex_);
    capabilities_.kernel = false;
  }
  note("the copy kernel is not used any more: " + why);
}

PathCount Copier::count(Path path) const {
  const Cell& cell = counts_[static_cast<size_t>(path)];
  return {cell.pieces, cell.bytes, cell.calls};
}

void Copier::add(Path path, std::span<const Segment> segments, size_t pages, int64_t calls) {
  Cell& cell = counts_[static_cast<size_t>(path)];
  int64_t bytes = 0;
  for (const Segment& segment : segments) bytes += segment.run_bytes;
  ++cell.pieces;
  cell.bytes += bytes * static_cast<int64_t>(pages);
  cell.calls += calls;
}

std::string Copier::enqueue(Direction direction, std::span<const Segment> segments,
                            std::span<const PageEnds> pages, bool registered, int staging,
                            StreamHandle stream) {
  if (pages.empty() || segments.empty()) return {};
  Capabilities usable = capabilities();
  usable.kernel = usable.kernel && registered && staging != kNoStaging;
  // The driver stages pageable memory itself; what batches do with it is not documented.
  usable.batch = usable.batch && registered;
  const SplitRuns split = usable.kernel ? split_runs(segments, pages.size(), ways(direction))
                                        : SplitRuns{{}, {segments.begin(), segments.end()}};
  if (!split.by_kernel.empty()) {
    const std::vector<CopyChunk> chunks = cut_to_chunks(split.by_kernel.data(), split.by_kernel.size());
    Staging& tables = tables_of(direction, staging);
    if (!tables.reserve(table_bytes(chunks, pages)).empty()) {
      return by_engine(direction, segments, pages, usable, stream);
    }
    const std::string failure = by_kernel(direction, chunks, pages, tables, stream);
    if (!failure.empty()) {
      give_up_kernel(failure);
      return by_engine(direction, segments, pages, usable, stream);
    }
    add(Path::kKernel, split.by_kernel, pages.size(), 1);
  }
  if (split.by_engine.empty()) return {};
  return by_engine(direction, split.by_engine, pages, usable, stream);
}

std::string Copier::by_engine(Direction direction, std::span<const Segment> segments,
                              std::span<const PageEnds> pages, const Capabilities& usable,
                              StreamHandle stream) {
  const std::vector<Copy> copies = list_copies(segments, pages);
  if (copies.empty()) return {};
  Path path = engine_path(usable);
  std::string error;
  int64_t calls = 0;
  std::vector<PitchedCopy> rows;
  if (copies.size() > 1 && (path != Path::kBatch || rows_first(direction, copies))) {
    rows = group_rows(copies, usable.max_pitch_bytes);
    if (path == Path::kBatch && rows.size() * kLeastRows <= copies.size()) path = Path::kPitched;
  }
  if (copies.size() == 1) {
    path = Path::kSingle;
    error = single(direction, copies.front(), stream);
    calls = 1;
  } else if (path == Path::kBatch) {
    error = by_batch(direction, copies, stream, calls);
  } else {
    error = by_rows(direction, rows, stream, calls);  // without pitched copies a row each
  }
  if (error.empty()) {
    add(path, segments, pages.size(), calls);
  } else {
    counts_[static_cast<size_t>(path)].calls += calls;
  }
  return error;
}

// By the mean length: mostly all copies have one.
bool Copier::rows_first(Direction direction, std::span<const Copy> copies) const {
  size_t bytes = 0;
  for (const Copy& copy : copies) bytes += copy.bytes;
  const size_t place = length_place(static_cast<int64_t>(bytes / copies.size()));
  return ways(direction).rows_first[std::min(place, kRunLengths.size() - 1)];
}

Copier::Staging& Copier::tables_of(Direction direction, int staging) const {
  return *stagings_[static_cast<size_t>(staging + (direction == Direction::kToHost ? kStagings : 0))];
}

std::string Copier::by_kernel(Direction direction, std::span<const CopyChunk> chunks,
                              std::span<const PageEnds> pages, Staging& tables, StreamHandle stream) {
  auto* chunk_table = static_cast<CopyChunk*>(tables.memory);
  std::memcpy(chunk_table, chunks.data(), chunks.size_bytes());
  auto* page_table = reinterpret_cast<CopyPage*>(chunk_table + chunks.size());
  for (size_t i = 0; i < pages.size(); ++i) {
    page_table[i] = {pages[i].block, reinterpret_cast<uintptr_t>(pages[i].stripe)};
  }
  const CopyJob job{chunk_table, page_table, static_cast<int32_t>(chunks.size()),
                    static_cast<int32_t>(pages.size()), direction == Direction::kToDevice};
  return launcher_(job, std::min(kKernelMultiprocessors, device_->multiprocessors()), stream);
}

std::string Copier::single(Direction direction, const Copy& copy, StreamHandle stream) {
  const Driver& driver = device_->driver();
  const bool to_device = direction == Direction::kToDevice;
  const Code code = to_device ? driver.copy_to_device(copy.device, copy.host, copy.bytes, stream)
                              : driver.copy_to_host(copy.host, copy.device, copy.bytes, stream);
  if (code == kSuccess) return {};
  return driver.error_text(code, to_device ? "cuMemcpyHtoDAsync" : "cuMemcpyDtoHAsync");
}

Code Copier::batch_call(size_t begin, size_t end, SourceOrder order, StreamHandle stream) {
  const Driver& driver = device_->driver();
  BatchAttributes attributes;
  attributes.order = order;
  size_t first = 0;  // the one set of attributes holds from the first copy on
  if (driver.batch_13000 != nullptr) {
    return driver.batch_13000(dsts_.data() + begin, srcs_.data() + begin, sizes_.data() + begin, end - begin,
                              &attributes, &first, 1, stream);
  }
  size_t failed = SIZE_MAX;
  return driver.batch_12080(dsts_.data() + begin, srcs_.data() + begin, sizes_.data() + begin, end - begin,
                            &attributes, &first, 1, &failed, stream);
}

std::string Copier::by_batch(Direction direction, std::span<const Copy> copies, StreamHandle stream,
                             int64_t& calls) {
  const bool to_device = direction == Direction::kToDevice;
  dsts_.clear();
  srcs_.clear();
  sizes_.clear();
  for (const Copy& copy : copies) {
    if (copy.bytes == 0) continue;  // the call refuses them
    const auto host = static_cast<DeviceAddress>(reinterpret_cast<uintptr_t>(copy.host));
    const auto device = static_cast<DeviceAddress>(copy.device);
    dsts_.push_back(to_device ? device : host);
    srcs_.push_back(to_device ? host : device);
    sizes_.push_back(copy.bytes);
  }
  // A loaded page was complete in host memory before its op was let start, so its bytes may be read at any
  // time. What a store reads is written by the work that the stream waits for.
  const SourceOrder order = to_device ? SourceOrder::kAny : SourceOrder::kStream;
  for (size_t begin = 0; begin < sizes_.size(); begin += kMostBatchCopies) {
    ++calls;
    const Code code = batch_call(begin, std::min(sizes_.size(), begin + kMostBatchCopies), order, stream);
    if (code != kSuccess) return device_->driver().error_text(code, "cuMemcpyBatchAsync");
  }
  return {};
}

std::string Copier::by_rows(Direction direction, std::span<const PitchedCopy> rows, StreamHandle stream,
                            int64_t& calls) {
  const Driver& driver = device_->driver();
  for (const PitchedCopy& group : rows) {
    ++calls;
    if (group.rows == 1) {
      if (std::string error = single(direction, group.first, stream); !error.empty()) return error;
      continue;
    }
    Copy2D copy;
    copy.width = group.first.bytes;
    copy.height = group.rows;
    if (direction == Direction::kToDevice) {
      copy.src_type = kMemoryTypeHost;
      copy.src_host = group.first.host;
      copy.src_pitch = group.host_step;
      copy.dst_type = kMemoryTypeDevice;
      copy.dst_device = group.first.device;
      copy.dst_pitch = group.device_step;
    } else {
      copy.src_type = kMemoryTypeDevice;
      copy.src_device = group.first.device;
      copy.src_pitch = group.device_step;
      copy.dst_type = kMemoryTypeHost;
      copy.dst_host = group.first.host;
      copy.dst_pitch = group.host_step;
    }
    const Code code = driver.copy_2d(&copy, stream);
    if (code != kSuccess) return driver.error_text(code, "cuMemcpy2DAsync");
  }
  return {};
}

}  // namespace flexkv::cuda
