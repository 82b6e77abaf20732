// The fake driver's functions for memory: registration, allocation, copies and kernels.
#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>

#include "fake_cuda_device.h"

namespace flexkv::fake_cuda {

using cuda::BatchAttributes;
using cuda::Code;
using cuda::DeviceAddress;
using cuda::StreamHandle;

namespace {

// Precondition: the lock is held.
void require_current(int device, const char* rule) {
  require(!contexts().empty() && contexts().back() == device, rule);
}

// In the real driver, calls that free memory wait until the whole device is idle. So flexkv must not make
// such a call while work is in flight. Precondition: the lock is held.
void require_idle_devices() {
  for (const FakeStream* stream : world().streams) {
    require(stream->moving == 0, "memory freed while work is in flight: it waits for the whole device");
  }
}

// Counts a copy or launch, and returns whether it must fail. Precondition: the lock is held.
bool fails_now() {
  World& w = world();
  if (w.fail_in < 0) return false;
  return w.fail_in-- == 0;
}

using Ranges = std::map<void*, size_t>;

// Returns the range in `all` that contains `memory`; the map's end if no range does. Precondition: the lock
// is held.
Ranges::const_iterator range_of(const Ranges& all, const void* memory) {
  auto next = all.upper_bound(const_cast<void*>(memory));
  if (next == all.begin()) return all.end();
  --next;
  const auto* base = static_cast<const std::byte*>(next->first);
  return static_cast<const std::byte*>(memory) < base + next->second ? next : all.end();
}
Ranges::const_iterator registration_of(const void* memory) { return range_of(world().registered, memory); }
// Whether one copy may span all these bytes. The bytes must all belong to the same registration, or all to
// none (LMCache/LMCache#2413), and to the same allocation. Precondition: the lock is held.
bool of_one_range(const void* memory, size_t bytes) {
  if (bytes == 0) return true;
  const auto* last = static_cast<const std::byte*>(memory) + bytes - 1;
  const Ranges& allocations = world().allocations;
  return registration_of(memory) == registration_of(last) &&
         range_of(allocations, memory) == range_of(allocations, last);
}

// Enqueues a copy. The copy counts as a store if its target is registered host memory, otherwise as a load.
void enqueue_copy(FakeStream* stream, void* dst, const void* src, size_t bytes) {
  World& w = world();
  const auto count = static_cast<int64_t>(bytes);
  const size_t to_host = registration_of(dst) != w.registered.end() ? 1 : 0;
  const bool is_long = to_host == 1 && count > kLongStoreCopy;
  w.calls.bytes += count;
  w.calls.bytes_of_device[stream->device] += count;
  w.calls.longest_copy[to_host] = std::max(w.calls.longest_copy[to_host], count);
  w.bytes_in_flight[to_host] += count;
  w.calls.peak_bytes[to_host] = std::max(w.calls.peak_bytes[to_host], w.bytes_in_flight[to_host]);
  w.long_stores_in_flight += is_long ? 1 : 0;
  w.calls.peak_long_stores = std::max(w.calls.peak_long_stores, w.long_stores_in_flight);
  const bool breaks = w.break_next;
  ++stream->moving;
  push(stream, [=] {
    if (!breaks) std::memcpy(dst, src, bytes);
    const std::lock_guard lock(world().mutex);
    if (breaks) stream->error = kIllegalAddress;
    world().bytes_in_flight[to_host] -= count;
    world().long_stores_in_flight -= is_long ? 1 : 0;
    --stream->moving;
  });
}

// Precondition: the lock is held.
void check_stream(StreamHandle stream) {
  require(stream != nullptr, "a copy on the legacy null stream");
  require_current(as_stream(stream)->device, "a copy on a stream of a device that is not current");
  require(capture_of(as_stream(stream)) == nullptr, "a copy on a stream that is captured");
}

}  // namespace

Code host_register(void* memory, size_t bytes, unsigned flags) {
  const std::lock_guard lock(world().mutex);
  require(!contexts().empty(), "host_register without a current context");
  require((flags & cuda::kHostRegisterPortable) != 0, "memory registered for one device alone");
  if (const Code code = unsafe_call(); code != cuda::kSuccess) return code;
  if (world().registrations_to_refuse > 0) {
    --world().registrations_to_refuse;
    ++world().calls.refused_registrations;
    return kOutOfMemory;
  }
  const auto* last = static_cast<const std::byte*>(memory) + bytes - 1;
  if (registration_of(memory) != world().registered.end() ||
      registration_of(last) != world().registered.end()) {
    return kAlreadyRegistered;
  }
  world().registered.emplace(memory, bytes);
  world().calls.registered_bytes.push_back(bytes);
  return cuda::kSuccess;
}
Code host_unregister(void* memory) {
  const std::lock_guard lock(world().mutex);
  require(!contexts().empty(), "host_unregister without a current context");
  if (const Code code = unsafe_call(); code != cuda::kSuccess) return code;
  ++world().calls.unregistered;
  return world().registered.erase(memory) == 1 ? cuda::kSuccess : kInvalidValue;
}
Code host_alloc(void** memory, size_t bytes, unsigned) {
  const std::lock_guard lock(world().mutex);
  require(!contexts().empty(), "memory allocated without a current context");
  if (const Code code = refusal_of("cuMemHostAlloc"); code != cuda::kSuccess) return code;
  if (const Code code = unsafe_call(); code != cuda::kSuccess) return code;
  *memory = ::operator new(bytes);
  return cuda::kSuccess;
}
Code host_free(void* memory) {
  std::function<void()> before;
  {
    const std::lock_guard lock(world().mutex);
    before = world().on_free;
  }
  if (before) before();
  const std::lock_guard lock(world().mutex);
  require_idle_devices();
  require(!contexts().empty(), "memory freed without a current context");
  if (const Code code = unsafe_call(); code != cuda::kSuccess) return code;
  ::operator delete(memory);
  return cuda::kSuccess;
}
Code mem_alloc(DeviceAddress* address, size_t bytes) {
  void* memory = nullptr;
  const Code code = host_alloc(&memory, bytes, 0);
  if (code == cuda::kSuccess) *address = reinterpret_cast<uintptr_t>(memory);
  return code;
}
// The real cuMemFree waits for all earlier work of all streams. The fake waits only until no stream waits for
// a word. After 20 s it records a broken rule.
Code mem_free(DeviceAddress address) {
  {
    std::unique_lock lock(world().mutex);
    const auto waits = [](const FakeStream* stream) { return stream->word_waits > 0; };
    require(world().changed.wait_for(
                lock, std::chrono::seconds(20),
                [&] { return std::none_of(world().streams.begin(), world().streams.end(), waits); }),
            "memory freed while a stream waits for a word");
  }
  return host_free(reinterpret_cast<void*>(address));
}
Code copy_to_device(DeviceAddress dst, const void* src, size_t bytes, StreamHandle stream) {
  const std::lock_guard lock(world().mutex);
  check_stream(stream);
  ++world().calls.single;
  if (const Code code = unsafe_call(); code != cuda::kSuccess) return code;
  if (fails_now() || !of_one_range(src, bytes)) return kInvalidValue;
  if (!of_one_range(reinterpret_cast<const void*>(dst), bytes)) return kInvalidValue;
  enqueue_copy(as_stream(stream), reinterpret_cast<void*>(dst), src, bytes);
  return cuda::kSuccess;
}
Code copy_to_host(void* dst, DeviceAddress src, size_t bytes, StreamHandle stream) {
  return copy_to_device(reinterpret_cast<uintptr_t>(dst), reinterpret_cast<const void*>(src), bytes, stream);
}
Code copy_any(DeviceAddress dst, DeviceAddress src, size_t bytes, StreamHandle stream) {
  return copy_to_device(dst, reinterpret_cast<const void*>(src), bytes, stream);
}
Code memset_bytes(DeviceAddress address, unsigned char value, size_t bytes, StreamHandle stream) {
  const std::lock_guard lock(world().mutex);
  check_stream(stream);
  FakeStream* one = as_stream(stream);
  ++one->moving;
  push(one, [=] {
    std::memset(reinterpret_cast<void*>(address), value, bytes);
    const std::lock_guard inner(world().mutex);
    --one->moving;
  });
  return cuda::kSuccess;
}
// The fake reports memory that is not registered as device memory.
Code pointer_attribute(void* answer, int attribute, DeviceAddress address) {
  const std::lock_guard lock(world().mutex);
  if (attribute != cuda::kPointerMemoryType) return kInvalidValue;
  const bool host = registration_of(reinterpret_cast<void*>(address)) != world().registered.end();
  *static_cast<unsigned*>(answer) = host ? cuda::kMemoryTypeHost : cuda::kMemoryTypeDevice;
  return cuda::kSuccess;
}
Code batch(DeviceAddress* dsts, DeviceAddress* srcs, size_t* sizes, size_t count, BatchAttributes* attributes,
           size_t* indices, size_t attribute_count, StreamHandle stream) {
  const std::lock_guard lock(world().mutex);
  check_stream(stream);
  Calls& calls = world().calls;
  ++calls.batch;
  calls.largest_batch = std::max(calls.largest_batch, static_cast<int64_t>(count));
  require(count > 0 && count <= kMostBatchCopies, "a batch beyond what drivers bear");
  require(attribute_count == 1 && indices[0] == 0, "the first attributes must hold from copy 0");
  calls.orders.push_back(attributes->order);
  if (const Code code = unsafe_call(); code != cuda::kSuccess) return code;
  if (fails_now()) return kInvalidValue;
  const size_t to_host =
      registration_of(reinterpret_cast<void*>(dsts[0])) != world().registered.end() ? 1 : 0;
  calls.most_batch_bytes[to_host] =
      std::max(calls.most_batch_bytes[to_host], std::accumulate(sizes, sizes + count, int64_t{0}));
  for (size_t i = 0; i < count; ++i) {
    require(sizes[i] > 0, "an empty copy in a batch");
    if (!of_one_range(reinterpret_cast<const void*>(dsts[i]), sizes[i]) ||
        !of_one_range(reinterpret_cast<const void*>(srcs[i]), sizes[i])) {
      return kInvalidValue;
    }
    const size_t lost = world().settings.batch_corrupts && i + 1 == count ? 1 : 0;
    enqueue_copy(as_stream(stream), reinterpret_cast<void*>(dsts[i]), reinterpret_cast<const void*>(srcs[i]),
                 sizes[i] - lost);
  }
  return cuda::kSuccess;
}
Code batch_12080(DeviceAddress* dsts, DeviceAddress* srcs, size_t* sizes, size_t count,
                 BatchAttributes* attributes, size_t* indices, size_t attribute_count, size_t* failed,
                 StreamHandle stream) {
  *failed = 0;  // crashes if the caller passed the parameters of the other version of cuMemcpyBatchAsync
  return batch(dsts, srcs, sizes, count, attributes, indices, attribute_count, stream);
}

void run_on_cpu(const cuda::CopyJob& job, int32_t warps) {
  for (int32_t warp = warps - 1; warp >= 0; --warp) {
    for (int lane = kWarpThreads - 1; lane >= 0; --lane) {
      copy_share(job, warp, warps, lane, [&](int32_t) {
        const bool last = warp == 0 && lane == 0;
        if (last && job.words.passed != nullptr) __atomic_fetch_add(job.words.passed, 1, __ATOMIC_RELEASE);
      });
    }
  }
}

namespace {

std::string launch(const cuda::CopyJob& given, std::span<const std::byte> tables, int multiprocessors,
                   void* stream) {
  const std::lock_guard lock(world().mutex);
  require(tables.size() <= cuda::kTablesInLaunch, "more tables than a launch has room for");
  const auto own = std::make_shared<std::vector<std::byte>>(tables.begin(), tables.end());
  const cuda::CopyJob job = tables.empty() ? given : cuda::with_tables(given, own->data());
  ++world().calls.kernel;
  require(stream != nullptr, "a kernel on the legacy null stream");
  require(multiprocessors <= kMostMultiprocessors, "the kernel takes too many multiprocessors");
  if (fails_now()) return "the fake kernel was not launched";
  if (world().launches_to_fail > 0) {
    if (world().launches_to_fail != kAlways) --world().launches_to_fail;
    return "the fake kernel has no image for this device";
  }
  // The kernel's tables are read when the kernel runs, as on a real device.
  auto* one = static_cast<FakeStream*>(stream);
  require_current(one->device, "a kernel on a stream of a device that is not current");
  ++one->moving;
  World& w = world();
  const size_t to_host = job.to_device ? 0 : 1;
  w.calls.multiprocessors[to_host] = std::max(w.calls.multiprocessors[to_host], int64_t{multiprocessors});
  ++w.kernels_in_flight[to_host];
  w.calls.peak_kernels[to_host] = std::max(w.calls.peak_kernels[to_host], w.kernels_in_flight[to_host]);
  const bool corrupts = w.settings.kernel_corrupts;
  push(one, [job, own, one, corrupts, to_host] {
    if (job.stage_ends != nullptr) {
      const std::lock_guard inner(world().mutex);
      world().calls.stage_ends.assign(job.stage_ends, job.stage_ends + job.stage_count);
    }
    run_on_cpu(job, 3);
    if (corrupts && !job.to_device)
      *reinterpret_cast<std::byte*>(job.pages[0].host + job.chunks[0].page_offset) ^= std::byte{1};
    const std::lock_guard inner(world().mutex);
    --world().kernels_in_flight[to_host];
    --one->moving;
  });
  return {};
}

// Launches a kernel that waits until the word at `passed` has reached `value`. If the kernel's stream is
// destroyed, the fake ends the kernel.
std::string wait(const uint32_t* passed, uint32_t value, void* handle) {
  const std::lock_guard lock(world().mutex);
  auto* stream = static_cast<FakeStream*>(handle);
  require(capture_of(stream) == nullptr, "a kernel that waits, on a stream that is captured");
  require_current(stream->device, "a kernel on a stream of a device that is not current");
  if (refusal_of("the kernel that waits") != cuda::kSuccess) return "the fake kernel has no image";
  ++world().calls.word_waits;
  ++stream->word_waits;
  push(stream, [passed, value, stream] {
    std::unique_lock inner(world().mutex);
    while (static_cast<int32_t>(__atomic_load_n(passed, __ATOMIC_ACQUIRE) - value) < 0 && !stream->ends) {
      world().changed.wait_for(inner, std::chrono::microseconds(50));
    }
    --stream->word_waits;
    world().changed.notify_all();
  });
  return {};
}

}  // namespace

cuda::CopyKernels copy_kernels() { return {.copy = &launch, .wait = &wait}; }

}  // namespace flexkv::fake_cuda
