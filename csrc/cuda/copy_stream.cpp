#include "cuda/copy_stream.h"

#include <algorithm>
#include <new>
#include <thread>

#include "base/align.h"
#include "base/error.h"
#include "transfer/deadline.h"

namespace flexkv::cuda {
namespace {

constexpr size_t kAlign = 64;
// Number of stop words. The kernels of consecutive marks use these words in turn. If two kernels that are to
// be stopped share a word, the earlier kernel may miss its stop; it then runs to its end.
constexpr uint32_t kStopWords = 16;
// Unit: seconds. The maximum time that a stream may take to write a word in the self-test words_work(). An
// idle stream takes some microseconds.
constexpr double kWordTrialS = 1;
// Number of 4-byte words in device memory after the tables: the stop words and the stage words.
constexpr size_t kWords = kStopWords + kMostStages + 1;

}  // namespace

CopyStream::CopyStream(std::shared_ptr<Device> device, bool urgent, uint32_t marks)
    : device_(std::move(device)),
      stream_(device_, urgent),
      stops_(device_, true),
      host_(device_, kTablesBytes + kAlign),
      memory_(device_, kTablesBytes + kWords * sizeof(uint32_t)),
      word_(new(host_.bytes() + kTablesBytes) std::atomic<uint32_t>(marks)),
      marks_(marks) {
  const Driver& driver = device_->driver();
  Code code = driver.memset_bytes(static_cast<DeviceAddress>(memory_.address() + kTablesBytes), 0,
                                  kWords * sizeof(uint32_t), handle());
  if (code == kSuccess) code = driver.stream_synchronize(handle());
  if (code != kSuccess) throw CapacityError(driver.error_text(code, "cuMemsetD8Async"));
  by_word_ = device_->host_addresses_work() && words_work();
}

CopyStream::~CopyStream() {
  const QuietCurrent here(*device_);
  // The destructor waits for both streams, because marks and kernels write to memory that is freed next.
  device_->driver().stream_synchronize(handle());
  device_->driver().stream_synchronize(stops_.handle());
}

bool CopyStream::words_work() {
  if (!mark().empty()) return false;
  const auto deadline = deadline_in(kWordTrialS);
  while (by_word_ && !reached(marks_) && seconds_until(deadline) > 0) std::this_thread::yield();
  return reached(marks_);
}

StageWords CopyStream::stage_words() const {
  auto* const words = reinterpret_cast<uint32_t*>(memory_.address() + kTablesBytes) + kStopWords;
  return {words, words + kMostStages};
}

std::string CopyStream::mark() {
  const Driver& driver = device_->driver();
  marks_ = next_mark();
  if (by_word_) {
    const auto word = static_cast<DeviceAddress>(reinterpret_cast<uintptr_t>(word_));
    const Code code = driver.stream_write_value(handle(), word, marks_, kWriteValueDefault);
    if (code == kSuccess) return {};
    by_word_ = false;
  }
  try {
    events_.emplace_back(std::piecewise_construct, std::forward_as_tuple(marks_),
                         std::forward_as_tuple(device_, handle()));
    return {};
  } catch (const CapacityError& error) {
    // If this call fails, too, the stream is broken, and the mark must not count as reached.
    if (driver.stream_synchronize(handle()) == kSuccess) {
      events_.clear();
      word_->store(marks_, std::memory_order_release);
    }
    return error.what();
  }
}

bool CopyStream::reached(uint32_t mark) {
  // The difference is signed because mark numbers wrap around after four billion.
  if (static_cast<int32_t>(word_->load(std::memory_order_acquire) - mark) >= 0) return true;
  while (!events_.empty() && events_.front().second.ended_well()) {
    word_->store(events_.front().first, std::memory_order_release);
    events_.pop_front();
  }
  return static_cast<int32_t>(word_->load(std::memory_order_acquire) - mark) >= 0;
}

std::string CopyStream::failure() const {
  const Driver& driver = device_->driver();
  const Code code = driver.stream_query(handle());
  return code == kErrorNotReady ? std::string() : driver.failure(code, "cuStreamQuery");
}

std::optional<CopyStream::Tables> CopyStream::reserve(size_t bytes) {
  while (!in_use_.empty() && reached(in_use_.front().until)) in_use_.pop_front();
  const auto wanted = static_cast<size_t>(round_up(static_cast<int64_t>(bytes), kAlign));
  if (wanted > kTablesBytes) return std::nullopt;
  const size_t after = in_use_.empty() ? 0 : in_use_.back().end;
  const size_t begin = after + wanted <= kTablesBytes ? after : 0;
  const bool free = std::none_of(in_use_.begin(), in_use_.end(), [&](const InUse& one) {
    return one.begin < begin + wanted && begin < one.end;
  });
  if (!free) return std::nullopt;
  in_use_.push_back({next_mark(), begin, begin + wanted});
  return Tables{host_.bytes() + begin, static_cast<DeviceAddress>(memory_.address() + begin)};
}

std::string CopyStream::send(const Tables& tables, size_t bytes) {
  const Driver& driver = device_->driver();
  return driver.failure(driver.copy_to_device(tables.device, tables.host, bytes, handle()),
                        "cuMemcpyHtoDAsync");
}

DeviceAddress CopyStream::stop_word_of(uint32_t mark) const {
  return static_cast<DeviceAddress>(memory_.address() + kTablesBytes + mark % kStopWords * sizeof(uint32_t));
}

DeviceAddress CopyStream::stop_word() const { return stop_word_of(next_mark()); }

std::string CopyStream::stop(uint32_t mark) {
  const Driver& driver = device_->driver();
  return driver.failure(
      driver.stream_write_value(stops_.handle(), stop_word_of(mark), mark, kWriteValueDefault),
      "cuStreamWriteValue32");
}

// A failure of the write is ignored: it means that the context is broken.
void CopyStream::forget_stop(uint32_t mark) {
  device_->driver().stream_write_value(stops_.handle(), stop_word_of(mark), 0, kWriteValueDefault);
}

}  // namespace flexkv::cuda
