// flexkv's own stream for copying pages, with marks that show the stream's progress, and with memory for the
// tables of kernels.
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

// Only one thread may use a CopyStream, and the stream's device must be that thread's current device.
class CopyStream {
 public:
  // If `urgent` is set, the stream's kernels get multiprocessors before the kernels of other streams. The
  // first mark gets the number that follows `marks`. Throws CapacityError.
  CopyStream(std::shared_ptr<Device> device, bool urgent, uint32_t marks = 0);
  ~CopyStream();
  CopyStream(const CopyStream&) = delete;
  CopyStream& operator=(const CopyStream&) = delete;

  StreamHandle handle() const { return stream_.handle(); }

  // Returns the number that the next call of mark() will give to its mark. Numbers wrap around; 0 is never
  // used.
  uint32_t next_mark() const { return marks_ + 1 == 0 ? 1 : marks_ + 1; }
  // Enqueues a mark after the work enqueued so far. When that work has ended, the stream writes the mark's
  // number to a word in pinned memory, which a thread can read in some nanoseconds. If the driver does not
  // support such writes, an event is recorded instead. Returns an empty string on success, otherwise why no
  // mark was made. If no mark was made, either this call has waited for the stream to finish, or the stream
  // is broken.
  std::string mark();
  // Whether the work enqueued before `mark` has ended successfully. If the stream is broken, the result is
  // false for ever, and failure() says why.
  bool reached(uint32_t mark);
  // Says why the stream makes no more progress. Empty while work is in flight, and when all work has ended
  // successfully.
  std::string failure() const;

  struct Tables {
    std::byte* host;  // pinned memory, which the caller writes
    // Device memory to which send() copies the tables, so that a kernel that stores pages does not have to
    // read the tables over the link.
    DeviceAddress device;
  };
  // Reserves space for a kernel's tables until the next mark has been reached. Returns nullopt if the free
  // space is too small.
  std::optional<Tables> reserve(size_t bytes);
  // Enqueues a copy of the tables to the device. Returns an empty string on success, otherwise an error
  // message.
  std::string send(const Tables& tables, size_t bytes);

  // The words in which a kernel on this stream counts its stages.
  StageWords stage_words() const;
  // Must be called after the launch of a kernel that counts `stages` stages. Returns the value that
  // StageWords::passed has before the kernel counts its first stage; the value wraps around.
  uint32_t count_stages(int32_t stages) {
    return std::exchange(stages_, stages_ + static_cast<uint32_t>(stages));
  }

  // Address of the stop word (CopyJob::stop) for a kernel that is launched before the next mark.
  DeviceAddress stop_word() const;
  // Makes the kernel that was launched before `mark` end soon, even if the kernel has not started yet.
  // Returns an empty string on success, otherwise an error message.
  std::string stop(uint32_t mark);
  // Clears the stop word of a mark, because the mark's number will be used again after a wrap-around. Must be
  // called when a mark for which stop() was called has been reached.
  void forget_stop(uint32_t mark);

  // Unit: bytes. The size of the memory for all tables.
  static constexpr size_t kTablesBytes = 1 << 20;

 private:
  struct InUse {  // a range of the table memory, in use until the mark `until` is reached
    uint32_t until;
    size_t begin, end;
  };
  bool words_work();
  DeviceAddress stop_word_of(uint32_t mark) const;

  const std::shared_ptr<Device> device_;
  const Stream stream_, stops_;
  const PinnedMemory host_;    // the tables, then the word of the marks
  const DeviceMemory memory_;  // the tables, then the stop words, then the stage words
  std::atomic<uint32_t>* const word_;
  uint32_t marks_;
  // Marks that are recorded as events, because the stream cannot write the word.
  std::deque<std::pair<uint32_t, Event>> events_;
  bool by_word_ = true;
  uint32_t stages_ = 0;       // number of stages counted so far, including those of kernels in flight
  std::deque<InUse> in_use_;  // ordered by mark
};

}  // namespace flexkv::cuda
