#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <deque>

#include "base/align.h"
#include "base/error.h"
#include "gds/transform/device.h"
#include "gds/transform/tables.h"
#include "layout/segment.h"
#include "transfer/host_copy.h"
#include "transfer/memory_limit.h"

namespace flexkv {
namespace {

// Unit: bytes; a multiple of a leaf's size. A run is digested and copied in steps of this size. A step is
// large enough that the fence after each copy costs little, and small enough to stay in the L2 cache between
// the two operations.
constexpr int64_t kDigestStepBytes = 64 << 10;
// Unit: bytes. The alignment that huge pages need. Disk I/O is twice as fast if its buffers are on huge
// pages.
constexpr int64_t kHugePageBytes = 2 << 20;

class HostTransformer : public Transformer {
 public:
  HostTransformer(const PageMap& map, bool into_pool) : segments_(map.segments()), tables_(map, into_pool) {}

  // The batch is processed in the caller's thread, while the disks' threads continue.
  void launch(std::span<const TransformPage> pages) override {
    BatchResult result;
    for (const TransformPage& page : pages) {
      result.bad_run.push_back(has_digests(tables_.mode) ? move_verified(page) : move(page));
    }
    done_.push_back(std::move(result));
  }

  BatchResult wait() override {
    BatchResult result = std::move(done_.front());
    done_.pop_front();
    return result;
  }

 private:
  int32_t move(const TransformPage& page) const {
    auto* slot = reinterpret_cast<std::byte*>(page.slot);
    if (to_pool(tables_.mode)) {
      scatter_segments(segments_, page.block, slot);
    } else {
      gather_segments(segments_, page.block, slot);
    }
    return kNoBadRun;
  }

  int32_t move_verified(const TransformPage& page) const {
    auto* slot = reinterpret_cast<unsigned char*>(page.slot);
    auto* digests = reinterpret_cast<uint64_t*>(slot + tables_.digest_offset);
    const bool from_slot = tables_.mode == TransformMode::kToPoolVerified;
    int32_t bad = kNoBadRun;
    for (size_t i = 0; i < tables_.runs.size(); ++i) {
      const TransformRun& run = tables_.runs[i];
      auto* pool = reinterpret_cast<unsigned char*>(block_address(run.base, run.block_stride, page.block));
      unsigned char* in_slot = slot + run.slot_offset;
      uint64_t terms = 0;
      for (int64_t at = 0; at < run.bytes; at += kDigestStepBytes) {
        const auto bytes = static_cast<size_t>(std::min(kDigestStepBytes, run.bytes - at));
        const unsigned char* src = (from_slot ? in_slot : pool) + at;
        terms += run_terms(src, bytes, static_cast<uint64_t>(at / kLeafBytes));
        if (!in_pool(tables_.mode)) copy_run((from_slot ? pool : in_slot) + at, src, bytes);
      }
      const uint64_t digest = finish_run(terms, static_cast<uint64_t>(run.bytes));
      if (!verifies(tables_.mode)) {
        digests[i] = digest;
      } else if (digests[i] != digest) {
        bad = std::min(bad, static_cast<int32_t>(i));
      }
    }
    return bad;
  }

  std::vector<Segment> segments_;
  TransformTables tables_;
  std::deque<BatchResult> done_;  // results of finished batches that wait() has not returned yet
};

// Returns whether a byte can be read, according to the kernel. Only EFAULT means that it cannot be read;
// other errors say nothing about the byte.
bool readable(const char* byte) {
  char copy = 0;
  const iovec here{&copy, 1}, there{const_cast<char*>(byte), 1};
  return process_vm_readv(getpid(), &here, 1, &there, 1, 0) == 1 || errno != EFAULT;
}

class HostTransformDevice : public TransformDevice {
 public:
  std::string name() const override { return "host"; }
  int32_t number() const override { return kHostDevice; }

  void* allocate(int64_t bytes) override {
    // Refuses to allocate more than the available memory: if memory is overcommitted, the first access to the
    // new memory could invoke the OOM killer.
    const MemoryLimit limit = machine_memory_limit();
    if (bytes > limit.available_bytes) {
      throw CapacityError("no memory for " + std::to_string(bytes) + " bytes of staging: " +
                          std::to_string(limit.available_bytes) + " are available (" + limit.source + ")");
    }
    const bool huge = bytes >= kHugePageBytes;
    const int64_t unit = huge ? kHugePageBytes : kIoAlignBytes;
    const auto size = static_cast<size_t>(round_up(bytes, unit));
    void* memory = std::aligned_alloc(static_cast<size_t>(unit), size);
    if (memory == nullptr)
      throw CapacityError("no memory for " + std::to_string(bytes) + " bytes of staging");
    // madvise is only advice: if it fails, the buffer works, but is slower.
    if (huge) static_cast<void>(madvise(memory, size, MADV_HUGEPAGE));
    std::memset(memory, 0, size);  // touches all pages, so that transfers do not have to wait for page faults
    return memory;
  }
  void release(void* memory) override { std::free(memory); }

  std::string bind_thread() override { return {}; }
  std::string while_current(const std::function<std::string()>& work) override { return work(); }
  // A batch has one page. Transforms run in the caller's thread, so with small batches the disks can start
  // sooner.
  int32_t batch_pages(int32_t) const override { return 1; }
  std::string copy(void* dst, const void* src, int64_t bytes) override {
    copy_run(dst, src, static_cast<size_t>(bytes));
    return {};
  }

  std::string cannot_reach(const void* memory, int64_t bytes) const override {
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t begin = reinterpret_cast<uintptr_t>(memory) & ~(page - 1);
    const uintptr_t end = reinterpret_cast<uintptr_t>(memory) + static_cast<uintptr_t>(bytes);
    // A call of msync with MS_ASYNC writes nothing and only shows whether all of the memory is mapped. Memory
    // that is reserved without access rights counts as mapped, too, so the first and the last byte are also
    // read.
    const bool mapped = end > begin && msync(reinterpret_cast<void*>(begin), end - begin, MS_ASYNC) == 0;
    const auto* first = static_cast<const char*>(memory);
    if (mapped && readable(first) && readable(first + bytes - 1)) return {};
    return "not all of this memory is there";
  }
  std::unique_ptr<Transformer> transformer(const PageMap& map, bool into_pool, int32_t,
                                           StreamEvent*) override {
    return std::make_unique<HostTransformer>(map, into_pool);
  }

  std::string await_engine(StreamEvent*) override { return {}; }
};

}  // namespace

std::shared_ptr<TransformDevice> host_transform_device() { return std::make_shared<HostTransformDevice>(); }

}  // namespace flexkv
