// The functions of the fake CUDA driver. flexkv finds and calls them in the same way as those of the real
// driver.
#include <cstring>
#include <memory>
#include <utility>

#include "fake_cuda_device.h"

namespace flexkv::fake_cuda {
namespace {

using cuda::Code;
using cuda::ContextHandle;
using cuda::EventHandle;
using cuda::StreamHandle;

struct FakeEvent {
  int device = 0;
  int64_t recorded = 0;  // number of the event's latest event_record()
  int64_t reached = 0;   // the highest record number that the event's stream has executed
  FakeStream* stream = nullptr;
  bool captured = false;
};

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
Code device_get_pci(char* pci, int bytes, int) {
  std::strncpy(pci, "FFFF:00:00.0", static_cast<size_t>(bytes));  // a device that the machine does not have
  return cuda::kSuccess;
}
Code device_get_uuid(cuda::Uuid* uuid, int device) {
  for (int i = 0; i < 16; ++i) uuid->bytes[i] = static_cast<char>(0xF0 - i + device);
  return cuda::kSuccess;
}
Code device_total_mem(size_t* bytes, int) {
  *bytes = size_t{80} << 30;
  return cuda::kSuccess;
}
Code device_get_attribute(int* value, int attribute, int) {
  *value = attribute == cuda::kAttributeMultiprocessors ? 4 : 1;
  return cuda::kSuccess;
}
int device_of(ContextHandle context) { return static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1; }
Code context_retain(ContextHandle* context, int device) {
  const std::lock_guard lock(world().mutex);
  if (world().primary_contexts[device] == 0) {
    if (const Code code = unsafe_call(); code != cuda::kSuccess) return code;
  }
  ++world().primary_contexts[device];
  *context = reinterpret_cast<ContextHandle>(static_cast<uintptr_t>(device + 1));
  return cuda::kSuccess;
}
Code context_release(int device) {
  const std::lock_guard lock(world().mutex);
  auto& count = world().primary_contexts;
  require(count.count(device) != 0, "a primary context released that nobody holds");
  if (--count[device] == 0) count.erase(device);
  return cuda::kSuccess;
}
Code context_push(ContextHandle context) {
  const std::lock_guard lock(world().mutex);
  require(world().primary_contexts.count(device_of(context)) != 0, "a context current that is gone");
  if (const Code code = refusal_of("cuCtxPushCurrent"); code != cuda::kSuccess) return code;
  contexts().push_back(device_of(context));
  return cuda::kSuccess;
}
Code context_pop(ContextHandle*) {
  const std::lock_guard lock(world().mutex);
  require(!contexts().empty(), "a context popped where none was pushed");
  if (contexts().empty()) return kInvalidValue;
  contexts().pop_back();
  return cuda::kSuccess;
}
Code context_set(ContextHandle context) {
  const std::lock_guard lock(world().mutex);
  require(world().primary_contexts.count(device_of(context)) != 0, "a context current that is gone");
  if (contexts().empty()) contexts().push_back(0);
  contexts().back() = device_of(context);
  return cuda::kSuccess;
}
Code exchange_capture_mode(int* mode) {
  if (*mode < cuda::kCaptureGlobal || *mode > cuda::kCaptureRelaxed) return kInvalidValue;
  std::swap(*mode, own_capture_mode());
  return cuda::kSuccess;
}
Code stream_is_capturing(StreamHandle stream, int* status) {
  const std::lock_guard lock(world().mutex);
  if (const Code code = refusal_of("cuStreamIsCapturing"); code != cuda::kSuccess) return code;
  if (reinterpret_cast<uintptr_t>(stream) <= cuda::kLegacyStream) {
    return world().captures.empty() ? cuda::kSuccess : cuda::kErrorCaptureImplicit;
  }
  const FakeCapture* capture = capture_of(as_stream(stream));
  *status = capture == nullptr ? cuda::kNotCapturing : capture->whole ? 1 : 2;
  return cuda::kSuccess;
}
Code context_get_device(int* device) {
  *device = contexts().empty() ? 0 : contexts().back();
  return contexts().empty() ? kInvalidValue : cuda::kSuccess;
}
Code stream_priority_range(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return contexts().empty() ? kInvalidValue : cuda::kSuccess;
}
Code stream_create(StreamHandle* handle, unsigned flags, int priority) {
  const std::lock_guard lock(world().mutex);
  world().calls.priorities.push_back(priority);
  if (const Code code = unsafe_call(); code != cuda::kSuccess) return code;
  require(flags == cuda::kStreamNonBlocking, "an own stream must not wait for the null stream");
  require(!contexts().empty(), "stream_create without a current context");
  *handle = reinterpret_cast<StreamHandle>(new_stream(false, contexts().empty() ? 0 : contexts().back()));
  return cuda::kSuccess;
}
Code stream_destroy(StreamHandle handle) {
  {
    const std::lock_guard lock(world().mutex);
    if (const Code code = unsafe_call(); code != cuda::kSuccess) return code;
  }
  end_stream(as_stream(handle));
  return cuda::kSuccess;
}
Code stream_query(StreamHandle handle) {
  const std::lock_guard lock(world().mutex);
  if (const Code code = unsafe_call(); code != cuda::kSuccess) return code;
  ++world().calls.queries;
  const FakeStream* stream = as_stream(handle);
  if (stream->error != cuda::kSuccess) return stream->error;
  return stream->queue.empty() && !stream->busy ? cuda::kSuccess : cuda::kErrorNotReady;
}
// As on a real device, a failed stream writes nothing.
Code stream_write_value(StreamHandle handle, cuda::DeviceAddress address, uint32_t value, unsigned) {
  const std::lock_guard lock(world().mutex);
  if (world().settings.words_refused) return kInvalidValue;
  if (const Code code = refusal_of("cuStreamWriteValue32"); code != cuda::kSuccess) return code;
  if (const Code code = unsafe_call(); code != cuda::kSuccess) return code;
  require(capture_of(as_stream(handle)) == nullptr, "a word on a stream that is captured");
  if (world().settings.words_lost) return cuda::kSuccess;
  push(as_stream(handle), [address, value, stream = as_stream(handle)] {
    {
      const std::lock_guard inner(world().mutex);
      if (stream->error != cuda::kSuccess) return;
      ++world().calls.words;
    }
    __atomic_store_n(reinterpret_cast<uint32_t*>(address), value, __ATOMIC_RELEASE);
  });
  return cuda::kSuccess;
}
Code stream_synchronize(StreamHandle handle) {
  {
    const std::lock_guard lock(world().mutex);
    if (const Code code = unsafe_call(); code != cuda::kSuccess) return code;
  }
  drain(reinterpret_cast<uintptr_t>(handle));
  const std::lock_guard lock(world().mutex);
  return as_stream(handle)->error;
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
  if (const Code code = refusal_of("cuEventRecord"); code != cuda::kSuccess) return code;
  const auto event = shared_event(handle);
  ++world().calls.records;
  require(event->device == as_stream(stream)->device, "an event recorded on a stream of another device");
  event->captured = capture_of(as_stream(stream)) != nullptr;
  if (event->captured) return cuda::kSuccess;
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
  require(!event->captured || capture_of(as_stream(stream)) != nullptr,
          "a stream drawn into the engine's capture");
  if (FakeCapture* capture = capture_of(as_stream(stream)); capture != nullptr && !event->captured) {
    capture->whole = false;
    return kCaptureIsolation;
  }
  const int64_t number = event->recorded;  // 0: the event was never recorded, so the stream waits for nothing
  ++world().calls.waits;
  push(as_stream(stream), [event, number] {
    std::unique_lock inner(world().mutex);
    world().changed.wait(inner, [&] { return event->reached >= number; });
  });
  return cuda::kSuccess;
}
Code event_query(EventHandle handle) {
  const std::lock_guard lock(world().mutex);
  if (const Code code = unsafe_call(); code != cuda::kSuccess) return code;
  ++world().calls.queries;
  const auto event = shared_event(handle);
  if (event->reached < event->recorded) return cuda::kErrorNotReady;
  const bool there = event->stream != nullptr && world().streams.count(event->stream) != 0;
  return there ? event->stream->error : cuda::kSuccess;
}
Code event_synchronize(EventHandle handle) {
  std::unique_lock lock(world().mutex);
  if (const Code code = unsafe_call(); code != cuda::kSuccess) return code;
  const auto event = shared_event(handle);
  if (event->captured) return kCaptureUnsupported;
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
Code find(const char* name, void** function, int version, uint64_t, int*) {
#define FAKE_ENTRY(entry, fake) {entry, reinterpret_cast<void*>(&(fake))}
  static const std::map<std::string, void*> table = {
      FAKE_ENTRY("cuGetErrorString", get_error_string),
      FAKE_ENTRY("cuInit", init),
      FAKE_ENTRY("cuDriverGetVersion", driver_get_version),
      FAKE_ENTRY("cuDeviceGetCount", device_get_count),
      FAKE_ENTRY("cuDeviceGet", device_get),
      FAKE_ENTRY("cuDeviceGetName", device_get_name),
      FAKE_ENTRY("cuDeviceGetPCIBusId", device_get_pci),
      FAKE_ENTRY("cuDeviceGetUuid", device_get_uuid),
      FAKE_ENTRY("cuDeviceTotalMem", device_total_mem),
      FAKE_ENTRY("cuDeviceGetAttribute", device_get_attribute),
      FAKE_ENTRY("cuDevicePrimaryCtxRetain", context_retain),
      FAKE_ENTRY("cuDevicePrimaryCtxRelease", context_release),
      FAKE_ENTRY("cuCtxPushCurrent", context_push),
      FAKE_ENTRY("cuCtxPopCurrent", context_pop),
      FAKE_ENTRY("cuCtxSetCurrent", context_set),
      FAKE_ENTRY("cuThreadExchangeStreamCaptureMode", exchange_capture_mode),
      FAKE_ENTRY("cuStreamIsCapturing", stream_is_capturing),
      FAKE_ENTRY("cuMemcpyAsync", copy_any),
      FAKE_ENTRY("cuMemsetD8Async", memset_bytes),
      FAKE_ENTRY("cuPointerGetAttribute", pointer_attribute),
      FAKE_ENTRY("cuCtxGetDevice", context_get_device),
      FAKE_ENTRY("cuStreamCreateWithPriority", stream_create),
      FAKE_ENTRY("cuCtxGetStreamPriorityRange", stream_priority_range),
      FAKE_ENTRY("cuStreamQuery", stream_query),
      FAKE_ENTRY("cuStreamWriteValue32", stream_write_value),
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
  };
#undef FAKE_ENTRY
  if (std::strcmp(name, "cuMemcpyBatchAsync") == 0) {
    // As in the real driver, the requested version decides which of the two versions of cuMemcpyBatchAsync is
    // returned.
    if (version > world().settings.version || version < 12080) return kInvalidValue;
    *function = version >= 13000 ? reinterpret_cast<void*>(&batch) : reinterpret_cast<void*>(&batch_12080);
    return cuda::kSuccess;
  }
  const auto found = table.find(name);
  if (found == table.end()) return kInvalidValue;
  *function = found->second;
  return cuda::kSuccess;
}

}  // namespace

cuda::FindFunction finder() { return &find; }

}  // namespace flexkv::fake_cuda
