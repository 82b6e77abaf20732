// Our own stream for copying pages, with marks that show its progress and memory for kernels' tables.
#pragma once
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cuda/copy_job.h"
#include "cuda/device_memory.h"
#include "cuda/event.h"
#include "cuda/pinned_memory.h"

namespace flexkv::cuda {

// For one thread, whose current device it must be.
class CopyStream {
 public:
  // `marks`: the number before the first mark's. Throws CapacityError.
  CopyStream(std::shared_ptr<Device> device, bool urgent, uint32_t marks = 0);
  ~CopyStream();
  CopyStream(const CopyStream&) = delete;
  CopyStream& operator=(const CopyStream&) = delete;

  StreamHandle handle() const { return stream_.handle(); }

  // The number that the next mark() will have. Numbers wrap around, and 0 is none.
  uint32_t next_mark() const { return marks_ + 1 == 0 ? 1 : marks_ + 1; }
  // Marks the end of the work enqueued so far: by a word in pinned memory, which the stream writes when it
  // gets there and a thread reads in some nanoseconds, or by an event if the driver refuses that. Empty, or
  // why there is no mark: then this has waited for the stream instead, or the stream is broken.
  std::string mark();
  // Whether the work enqueued before that mark has ended successfully. It stays false if the stream is
  // broken; failure() then says why.
  bool reached(uint32_t mark);
  // Why nothing moves any more on the stream; empty while it does.
  std::string failure() const;

  struct Tables {
    std::byte* host;       // pinned: what the thread writes
    DeviceAddress device;  // where send() copies it: a kernel that stores must not read over the link
  };
  // Room for a kernel's tables, free again when the next mark has been reached. Unset: the room is in use, or
  // too small.
  std::optional<Tables> reserve(size_t bytes);
  // Enqueues a copy of the tables to the device. Empty, or why it failed.
  std::string send(const Tables& tables, size_t bytes);

  // For a kernel on this stream that counts its stages.
  StageWords stage_words() const;
  // Call after the launch of a kernel that counts `stages` stages. Returns the number that StageWords::passed
  // has before the first of them; it wraps around.
  uint32_t count_stages(int32_t stages) {
    return std::exchange(stages_, stages_ + static_cast<uint32_t>(stages));
  }

  // A kernel that is launched before the next mark reads this word; see CopyJob::stop.
  DeviceAddress stop_word() const;
  // Makes the kernel before that mark end soon, whether it has started or not. Empty, or why it failed.
  std::string stop(uint32_t mark);
  // Undoes stop() once the mark has been reached, because its number will come again.
  void forget_stop(uint32_t mark);

  // Unit: bytes. The room for all tables.
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
  const DeviceMemory memory_;  // the tables, then the stop words, then the stage words
  std::atomic<uint32_t>* const word_;
  uint32_t marks_;
  std::deque<std::pair<uint32_t, Event>> events_;  // instead of the word
  bool by_word_ = true;
  uint32_t stages_ = 0;       // that kernels have counted, or will have
  std::deque<InUse> in_use_;  // in the order of their marks
};

}  // namespace flexkv::cuda
