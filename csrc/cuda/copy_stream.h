// A stream of our own that pages are copied on: where its ends are seen, and the memory of kernels' tables.
#pragma once
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cuda/device_memory.h"
#include "cuda/event.h"
#include "cuda/pinned_memory.h"

namespace flexkv::cuda {

// For one thread, of which the device is current.
class CopyStream {
 public:
  // `marks`: the number that the first mark comes after. Throws CapacityError.
  CopyStream(std::shared_ptr<Device> device, bool urgent, uint32_t marks = 0);
  ~CopyStream();
  CopyStream(const CopyStream&) = delete;
  CopyStream& operator=(const CopyStream&) = delete;

  StreamHandle handle() const { return stream_.handle(); }

  // The number that the next mark() will have; they go round, and 0 is none.
  uint32_t next_mark() const { return marks_ + 1 == 0 ? 1 : marks_ + 1; }
  // Marks what the stream has been given: a word in pinned memory, which the stream writes when it comes to
  // it and a thread reads in some nanoseconds; where the driver refuses that, an event. Empty, or why there
  // is no mark: then the stream has been waited for instead, or is broken.
  std::string mark();
  // Whether what was enqueued before that mark has ended well. Of a stream on which nothing moves any more
  // failure() says so.
  bool reached(uint32_t mark);
  // Why nothing moves any more on the stream; empty while it does.
  std::string failure() const;

  struct Tables {
    std::byte* host;       // pinned: what the thread writes
    DeviceAddress device;  // where send() puts it: a kernel that stores must not read over the link
  };
  // Room for a kernel's tables, free again when the next mark has been reached. None: all is in use, or it is
  // never that much.
  std::optional<Tables> reserve(size_t bytes);
  // Empty, or why they are not sent.
  std::string send(const Tables& tables, size_t bytes);

  // A kernel that is launched before the next mark reads this word; see CopyJob::stop.
  DeviceAddress stop_word() const;
  // Has the kernel before that mark end soon, if it runs or will. Empty, or why not.
  std::string stop(uint32_t mark);
  // Takes that back once the mark has been reached: its number comes again.
  void forget_stop(uint32_t mark);

  // Unit: bytes. Of all tables.
  static constexpr size_t kTablesBytes = 1 << 20;

 private:
  struct InUse {  // tables, until this mark is reached
    uint32_t until;
    size_t begin, end;
  };
  bool words_work();
  DeviceAddress stop_word_of(uint32_t mark) const;

  const std::shared_ptr<Device> device_;
  const Stream stream_, stops_;
  const PinnedMemory host_;    // the tables, then the word
  const DeviceMemory memory_;  // the tables, then the stop words
  std::atomic<uint32_t>* const word_;
  uint32_t marks_;
  std::deque<std::pair<uint32_t, Event>> events_;  // instead of the word
  bool by_word_ = true;
  std::deque<InUse> in_use_;  // in the order of their marks
};

}  // namespace flexkv::cuda
