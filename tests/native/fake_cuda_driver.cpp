// The driver's functions, as the product finds and calls them.
#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "fake_cuda_device.h"

namespace flexkv::fake_cuda {
namespace {

using cuda::BatchAttributes;
using cuda::Code;
using cuda::ContextHandle;
using cuda::Copy2D;
using cuda::DeviceAddress;
using cuda::EventHandle;
using cuda::StreamHandle;

constexpr Code kInvalidValue = 1;
constexpr Code kInvalidDevice = 101;
constexpr Code kIllegalAddress = 700;
constexpr Code kAlreadyRegistered = 712;

struct FakeEvent {
  int device = 0;
  int64_t recorded = 0;  // number of its latest record call
  int64_t reached = 0;   // latest that its stream has passed
  FakeStream* stream = nullptr;
};

// Precondition: the lock is held.
void require_current(int device, const char* rule) {
  require(!contexts().empty() && contexts().back() == device, rule);
}

// The real calls wait until the whole device is idle. Precondition: the lock is held.
void require_idle_devices() {
  for (const FakeStream* stream : world().streams) {
    require(stream->moving == 0, "memory freed while work is in flight: it waits for the whole device");
  }
}

FakeStream* as_stream(StreamHandle handle) { return reinterpret_cast<FakeStream*>(handle); }

// Whether this copy call is to fail. Precondition: the lock is held.
bool fails_now() {
  World& w = world();
  if (w.fail_in < 0) return false;
  return w.fail_in-- == 0;
}

void enqueue_copy(FakeStream* stream, void* dst, const void* src, size_t bytes) {
  World& w = world();
  w.calls.bytes += static_cast<int64_t>(bytes);
  w.calls.bytes_of_device[stream->device] += static_cast<int64_t>(bytes);
  const bool breaks = w.break_next;
  ++stream->moving;
  push(stream, [=] {
    if (!breaks) std::memcpy(dst, src, bytes);
    const std::lock_guard lock(world().mutex);
    if (breaks) stream->error = kIllegalAddress;
    --stream->moving;
  });
}

Code get_error_string(Code code, const char** text) {
  *text = code == kIllegalAddress ? "an illegal memory access was encountered (fake)" : "a fake error";
  return cuda::kSuccess;
}
Code init(unsigned) { return cuda::kSuccess; }
Code driver_get_version(int* version) {
  *version = world().settings.version;
  return cuda::kSuccess;
}
Code device_get_count(int* count) {
  *count = world().settings.devices;
  return cuda::kSuccess;
}
Code device_get(int* device, int ordinal) {
  if (ordinal >= world().settings.devices) return kInvalidDevice;
  *device = ordinal;
  return cuda::kSuccess;
}
Code device_get_name(char* name, int bytes, int) {
  std::strncpy(name, "fake device", static_cast<size_t>(bytes));
  return cuda::kSuccess;
}
Code device_get_attribute(int* value, int attribute, int) {
  *value = attribute == cuda::kAttributeMaxPitch          ? world().settings.max_pitch
           : attribute == cuda::kAttributeMultiprocessors ? 4
                                                          : 1;
  return cuda::kSuccess;
}
Code context_retain(ContextHandle* context, int device) {
  *context = reinterpret_cast<ContextHandle>(static_cast<uintptr_t>(device + 1));
  return cuda::kSuccess;
}
Code context_release(int) { return cuda::kSuccess; }
Code context_push(ContextHandle context) {
  contexts().push_back(static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1);
  return cuda::kSuccess;
}
Code context_pop(ContextHandle*) {
  contexts().pop_back();
  return cuda::kSuccess;
}
Code context_get_device(int* device) {
  *device = contexts().empty() ? 0 : contexts().back();
  return contexts().empty() ? kInvalidValue : cuda::kSuccess;
}
Code stream_create(StreamHandle* handle, unsigned flags) {
  const std::lock_guard lock(world().mutex);
  require(flags == cuda::kStreamNonBlocking, "an own stream must not wait for the null stream");
  require(!contexts().empty(), "stream_create without a current context");
  *handle = reinterpret_cast<StreamHandle>(new_stream(false, contexts().empty() ? 0 : contexts().back()));
  return cuda::kSuccess;
}
Code stream_destroy(StreamHandle handle) {
  end_stream(as_stream(handle));
  return cuda::kSuccess;
}
Code stream_synchronize(StreamHandle handle) {
  drain(reinterpret_cast<uintptr_t>(handle));
  return cuda::kSuccess;
}
Code event_create(EventHandle* handle, unsigned flags) {
  const std::lock_guard lock(world().mutex);
  require((flags & cuda::kEventBlockingSync) != 0, "host waits must sleep");
  require(!contexts().empty(), "event_create without a current context");
  auto event = std::make_shared<FakeEvent>();
  event->device = contexts().empty() ? 0 : contexts().back();
  *handle = reinterpret_cast<EventHandle>(new std::shared_ptr<FakeEvent>(std::move(event)));
  return cuda::kSuccess;
}
std::shared_ptr<FakeEvent> shared_event(EventHandle handle) {
  return *reinterpret_cast<std::shared_ptr<FakeEvent>*>(handle);
}
Code event_record(EventHandle handle, StreamHandle stream) {
  const std::lock_guard lock(world().mutex);
  const auto event = shared_event(handle);
  ++world().calls.records;
  require(event->device == as_stream(stream)->device, "an event recorded on a stream of another device");
  const int64_t number = ++event->recorded;
  event->stream = as_stream(stream);
  push(as_stream(stream), [event, number] {
    const std::lock_guard inner(world().mutex);
    event->reached = number;
    world().changed.notify_all();
  });
  return cuda::kSuccess;
}
Code stream_wait_event(StreamHandle stream, EventHandle handle, unsigned) {
  const std::lock_guard lock(world().mutex);
  const auto event = shared_event(handle);
  const int64_t number = event->recorded;  // 0: never recorded, waits for nothing
  ++world().calls.waits;
  push(as_stream(stream), [event, number] {
    std::unique_lock inner(world().mutex);
    world().changed.wait(inner, [&] { return event->reached >= number; });
  });
  return cuda::kSuccess;
}
Code event_query(EventHandle handle) {
  const std::lock_guard lock(world().mutex);
  const auto event = shared_event(handle);
  return event->reached >= event->recorded ? cuda::kSuccess : cuda::kErrorNotReady;
}
Code event_synchronize(EventHandle handle) {
  std::unique_lock lock(world().mutex);
  const auto event = shared_event(handle);
  const int64_t number = event->recorded;
  world().changed.wait(lock, [&] { return event->reached >= number; });
  if (event->stream == nullptr || world().streams.count(event->stream) == 0) return cuda::kSuccess;
  return std::exchange(event->stream->error, cuda::kSuccess);
}
Code event_destroy(EventHandle handle) {
  const std::lock_guard lock(world().mutex);
  delete reinterpret_cast<std::shared_ptr<FakeEvent>*>(handle);
  return cuda::kSuccess;
}
Code host_register(void* memory, size_t bytes, unsigned flags) {
  const std::lock_guard lock(world().mutex);
  require(!contexts().empty(), "host_register without a current context");
  require((flags & cuda::kHostRegisterPortable) != 0, "memory registered for one device alone");
  return world().registered.emplace(memory, bytes).second ? cuda::kSuccess : kAlreadyRegistered;
}
Code host_unregister(void* memory) {
  const std::lock_guard lock(world().mutex);
  require(!contexts().empty(), "host_unregister without a current context");
  return world().registered.erase(memory) == 1 ? cuda::kSuccess : kInvalidValue;
}
Code host_alloc(void** memory, size_t bytes, unsigned) {
  *memory = ::operator new(bytes);
  return cuda::kSuccess;
}
Code host_free(void* memory) {
  const std::lock_guard lock(world().mutex);
  require_idle_devices();
  ::operator delete(memory);
  return cuda::kSuccess;
}
Code mem_alloc(DeviceAddress* address, size_t bytes) {
  *address = reinterpret_cast<uintptr_t>(::operator new(bytes));
  return cuda::kSuccess;
}
Code mem_free(DeviceAddress address) {
  const std::lock_guard lock(world().mutex);
  require_idle_devices();
  ::operator delete(reinterpret_cast<void*>(address));
  return cuda::kSuccess;
}

// Precondition: the lock is held.
void check_stream(StreamHandle stream) {
  require(stream != nullptr, "a copy on the legacy null stream");
  require_current(as_stream(stream)->device, "a copy on a stream of a device that is not current");
}

Code copy_to_device(DeviceAddress dst, const void* src, size_t bytes, StreamHandle stream) {
  const std::lock_guard lock(world().mutex);
  check_stream(stream);
  ++world().calls.single;
  if (fails_now()) return kInvalidValue;
  enqueue_copy(as_stream(stream), reinterpret_cast<void*>(dst), src, bytes);
  return cuda::kSuccess;
}
Code copy_to_host(void* dst, DeviceAddress src, size_t bytes, StreamHandle stream) {
  return copy_to_device(reinterpret_cast<uintptr_t>(dst), reinterpret_cast<const void*>(src), bytes, stream);
}
Code copy_2d(const Copy2D* copy, StreamHandle stream) {
  const std::lock_guard lock(world().mutex);
  check_stream(stream);
  ++world().calls.pitched;
  const auto most = static_cast<size_t>(world().settings.max_pitch);
  require(copy->src_pitch <= most && copy->dst_pitch <= most, "a pitch beyond the device's");
  require(copy->src_pitch >= copy->width && copy->dst_pitch >= copy->width, "a pitch below the width");
  if (fails_now()) return kInvalidValue;
  const bool from_host = copy->src_type == cuda::kMemoryTypeHost;
  const auto* src = from_host ? static_cast<const std::byte*>(copy->src_host)
                              : reinterpret_cast<const std::byte*>(copy->src_device);
  auto* dst =
      from_host ? reinterpret_cast<std::byte*>(copy->dst_device) : static_cast<std::byte*>(copy->dst_host);
  for (size_t row = 0; row < copy->height; ++row) {
    enqueue_copy(as_stream(stream), dst + row * copy->dst_pitch, src + row * copy->src_pitch, copy->width);
  }
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
  if (fails_now()) return kInvalidValue;
  for (size_t i = 0; i < count; ++i) {
    require(sizes[i] > 0, "an empty copy in a batch");
    const size_t lost = world().settings.batch_corrupts && i + 1 == count ? 1 : 0;
    enqueue_copy(as_stream(stream), reinterpret_cast<void*>(dsts[i]), reinterpret_cast<const void*>(srcs[i]),
                 sizes[i] - lost);
  }
  return cuda::kSuccess;
}
Code batch_12080(DeviceAddress* dsts, DeviceAddress* srcs, size_t* sizes, size_t count,
                 BatchAttributes* attributes, size_t* indices, size_t attribute_count, size_t* failed,
                 StreamHandle stream) {
  *failed = 0;  // faults here if the caller used the other parameters
  return batch(dsts, srcs, sizes, count, attributes, indices, attribute_count, stream);
}

Code find(const char* name, void** function, int version, uint64_t, int*) {
#define FAKE_ENTRY(entry, fake) {entry, reinterpret_cast<void*>(&(fake))}
  static const std::map<std::string, void*> table = {
      FAKE_ENTRY("cuGetErrorString", get_error_string),
      FAKE_ENTRY("cuInit", init),
      FAKE_ENTRY("cuDriverGetVersion", driver_get_version),
      FAKE_ENTRY("cuDeviceGetCount", device_get_count),
      FAKE_ENTRY("cuDeviceGet", device_get),
      FAKE_ENTRY("cuDeviceGetName", device_get_name),
      FAKE_ENTRY("cuDeviceGetAttribute", device_get_attribute),
      FAKE_ENTRY("cuDevicePrimaryCtxRetain", context_retain),
      FAKE_ENTRY("cuDevicePrimaryCtxRelease", context_release),
      FAKE_ENTRY("cuCtxPushCurrent", context_push),
      FAKE_ENTRY("cuCtxPopCurrent", context_pop),
      FAKE_ENTRY("cuCtxGetDevice", context_get_device),
      FAKE_ENTRY("cuStreamCreate", stream_create),
      FAKE_ENTRY("cuStreamDestroy", stream_destroy),
      FAKE_ENTRY("cuStreamWaitEvent", stream_wait_event),
      FAKE_ENTRY("cuStreamSynchronize", stream_synchronize),
      FAKE_ENTRY("cuEventCreate", event_create),
      FAKE_ENTRY("cuEventRecord", event_record),
      FAKE_ENTRY("cuEventQuery", event_query),
      FAKE_ENTRY("cuEventSynchronize", event_synchronize),
      FAKE_ENTRY("cuEventDestroy", event_destroy),
      FAKE_ENTRY("cuMemHostRegister", host_register),
      FAKE_ENTRY("cuMemHostUnregister", host_unregister),
      FAKE_ENTRY("cuMemHostAlloc", host_alloc),
      FAKE_ENTRY("cuMemFreeHost", host_free),
      FAKE_ENTRY("cuMemAlloc", mem_alloc),
      FAKE_ENTRY("cuMemFree", mem_free),
      FAKE_ENTRY("cuMemcpyHtoDAsync", copy_to_device),
      FAKE_ENTRY("cuMemcpyDtoHAsync", copy_to_host),
      FAKE_ENTRY("cuMemcpy2DAsync", copy_2d),
  };
#undef FAKE_ENTRY
  if (std::strcmp(name, "cuMemcpyBatchAsync") == 0) {
    // As the real one: which of the two it is depends on the version asked for.
    if (version > world().settings.version || version < 12080) return kInvalidValue;
    *function = version >= 13000 ? reinterpret_cast<void*>(&batch) : reinterpret_cast<void*>(&batch_12080);
    return cuda::kSuccess;
  }
  const auto found = table.find(name);
  if (found == table.end()) return kInvalidValue;
  *function = found->second;
  return cuda::kSuccess;
}

std::string launch(const cuda::CopyJob& job, int multiprocessors, void* stream) {
  const std::lock_guard lock(world().mutex);
  ++world().calls.kernel;
  require(stream != nullptr, "a kernel on the legacy null stream");
  require(multiprocessors <= kMostMultiprocessors, "the kernel takes too many multiprocessors");
  if (fails_now()) return "the fake kernel was not launched";
  // The tables are read when the kernel runs, as on a device.
  auto* one = static_cast<FakeStream*>(stream);
  require_current(one->device, "a kernel on a stream of a device that is not current");
  ++one->moving;
  push(one, [job, one] {
    cuda::run_on_cpu(job, 3);
    const std::lock_guard inner(world().mutex);
    --one->moving;
  });
  return {};
}

}  // namespace

cuda::FindFunction finder() { return &find; }
cuda::KernelLauncher kernel_launcher() { return &launch; }

}  // namespace flexkv::fake_cuda
