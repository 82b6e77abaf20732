// One disk of the disk tier: a queue of pages to read and write, and the thread that does all its I/O. Reads
// go before writes. While other I/Os are in flight, the thread verifies the pages that it has read, and seals
// (adds the trailer to) the pages that it writes. It verifies only a few pages at a time, and begins new I/Os
// in between.
#pragma once
#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "io/io_queue.h"
#include "storage/layer_reads.h"
#include "storage/page_codec.h"
#include "storage/slab_file.h"
#include "storage/zero_fill.h"
#include "transfer/deadline.h"
#include "transfer/host_pool.h"
#include "transfer/lane.h"

namespace flexkv {

// The description of one KV group, which is the same for all disks.
struct DiskGroup {
  std::shared_ptr<const PageCodec> codec;
  std::vector<LayerReads> layer_reads;
  std::shared_ptr<HostPool> pool;
};

struct DiskOptions {
  IoBackend io = IoBackend::kAuto;
  int32_t depth = 32;  // the maximum number of I/Os in flight
  // A disk without progress for this many seconds counts as hung. 0: a disk never counts as hung.
  double stuck_s = 30.0;
  // Whether to register the host pools with io_uring, so that their memory stays pinned. Otherwise, it is
  // pinned for each I/O.
  bool register_buffers = false;
  // Whether the I/O thread writes zeros, while the disk is idle, to slots that have allocated space but were
  // never written.
  bool zero_fill = false;
};

struct DiskCounts {
  std::atomic<int64_t> read_pages{0}, read_bytes{0}, written_pages{0}, written_bytes{0}, write_errors{0},
      zeroed_bytes{0};
  std::array<std::atomic<int64_t>, kPageMisses> misses{};
};

// One page of a work item, to be read or written by one disk.
struct PageTask {
  std::shared_ptr<WorkItem> item;
  size_t index = 0;  // the page's index in the work item
  PageMove move;
  int64_t slot = 0;  // number of the page's slot in the disk's slab
};

class Disk {
 public:
  // `wrap` wraps the I/O queue in a queue that a test provides; it may be null. `on_change` is called after
  // the value of queued() has fallen, or after the disk was lost. It may be called in any thread; the calling
  // thread then holds no lock.
  Disk(int32_t number, std::vector<std::shared_ptr<SlabFile>> slabs,
       std::shared_ptr<const std::vector<DiskGroup>> groups, const DiskOptions& options, WrapQueue wrap,
       std::function<void()> on_change);

  // Queues tasks. If the disk is lost, reports their pages as LANE_DOWN to `source` at once.
  void push(std::vector<PageTask> tasks, WorkSource& source);
  size_t queued() const;
  // The lane queues more pages on this disk only while fewer than room_below() pages are queued.
  size_t room_below() const { return room_below_; }
  bool lost() const;
  std::string lost_reason() const;
  std::string backend() const;
  // Says how the I/O backend differs from the requested one, and why; empty if it does not differ.
  std::string backend_note() const;
  // Says why the disk is full; empty if it is not. While the disk is full, writes to a slot fail if the file
  // system has not yet allocated the slot's space. If even an allocated slot could not be written, all writes
  // may fail. The reason stays until a successful write shows that there is space again.
  std::string full_reason() const;
  // Takes the disk out of service: no further I/O is begun. Queued pages fail with LANE_DOWN at once, and
  // pages in flight are reported after their I/O has finished. The queued pages are reported to `source`,
  // which may be null if no pages are queued.
  void take_out(const std::string& reason, WorkSource* source);
  // The watchdog calls this at regular intervals. Returns true if the oldest job in flight was the same in
  // the last `looks` calls, so that the disk counts as hung.
  bool look(int32_t looks);

  // The body of the I/O thread. It returns when stop() has been called and nothing is queued or in flight any
  // more.
  void run(const std::shared_ptr<WorkSource>& source);
  void stop();
  // If the I/O thread is writing zeros, waits until that write has finished, but not beyond `until`. Returns
  // true if the thread is not writing zeros any more: run() then returns as soon as the pages in flight have
  // finished. Returns false if the write has not finished by then: it may hang, but no work item waits for
  // it. Precondition: stop() has been called.
  bool will_end(Clock::time_point until);

  const DiskCounts& counts() const { return counts_; }
  // Releases this object's references to the files. Precondition: run() has returned, was never called, or
  // hangs in a write of zeros. If it hangs, the files stay open, because ZeroFill has references of its own.
  void close_files() { slabs_.clear(); }

 private:
  // The read or the write of one page, which may take several I/Os.
  struct Job {
    PageTask task;
    const DiskGroup* group = nullptr;
    bool write = false;
    uint64_t sequence = 0;  // number of the job, in the order in which jobs begin; 0: this object is free
    int64_t bytes = 0;      // total size of the job's I/Os
    int32_t open_ios = 0;   // number of the job's I/Os that have not finished
    int32_t error = 0;      // errno of the job's first I/O that failed; 0: none failed
    int64_t missing = 0;    // number of requested bytes that short I/Os did not move
    // Whether the success of this write would show that a full disk has space again.
    bool shows_room = false;
    const LayerReads* layers = nullptr;  // the layers to read; null: the complete image
    std::vector<std::byte*> span_at;     // address to which each span of `layers` is read
    // A separate buffer for the I/O; null if the I/O uses the host slot directly.
    std::unique_ptr<std::byte, void (*)(void*)> bounce{nullptr, nullptr};
  };
  struct Io {
    size_t job = 0;
    IoRequest request;
  };
  // Pages of one work item that have finished, and their results.
  struct Ended {
    std::shared_ptr<WorkItem> item;
    std::vector<size_t> indices;
    std::vector<MoveResult> results;
  };

  std::unique_ptr<IoQueue> make_queue();
  IoMemories host_memory();
  void note(const std::string& text);
  void work(IoQueue& queue, WorkSource& source);
  bool wait_for_tasks();
  void begin_picked(IoQueue& queue, std::vector<Ended>& ended);
  void note_oldest();
  bool pick(PageTask& task);
  void begin(const PageTask& task);
  void add_io(size_t job, bool write, std::byte* buffer, int64_t bytes, int64_t image_offset);
  void begin_layers(size_t job);
  void begin_seal(size_t job);
  void submit_ios(IoQueue& queue);
  void io_done(const IoDone& done);
  void end_arrived(std::vector<Ended>& ended);
  MoveResult end(Job& job);
  MoveResult end_read(Job& job);
  PageCheck check(Job& job, std::byte* image);
  MoveResult miss(const Job& job, const PageCheck& check);
  void disk_error(bool write, int32_t error);
  bool has_space(const PageTask& task) const;
  bool is_full(const Job& job) const;
  void set_full(const std::string& reason);
  MoveResult write_failed(const PageTask& task, const std::string& why);
  static void report(const std::vector<Ended>& ended, WorkSource& source);
  static void add(std::vector<Ended>& ended, const PageTask& task, MoveResult result);
  MoveResult lost_result() const;

  const int32_t number_;
  std::vector<std::shared_ptr<SlabFile>> slabs_;  // one element per group; several groups may share a slab
  const std::shared_ptr<const std::vector<DiskGroup>> groups_;
  const DiskOptions options_;
  const WrapQueue wrap_;  // null: the queue is not wrapped
  const std::function<void()> on_change_;
  const size_t room_below_;
  DiskCounts counts_;

  mutable std::mutex mutex_;  // guards the members from here to the next blank line
  std::condition_variable work_;
  std::deque<PageTask> reads_;
  std::deque<PageTask> writes_;
  // Not null while the I/O thread may be in IoQueue::wait(); push() then ends that wait.
  IoQueue* queue_ = nullptr;
  std::string backend_;
  std::string backend_note_;
  uint64_t pushes_ = 0;
  bool stopping_ = false;
  bool zero_filling_ = false;
  std::condition_variable zero_filled_;
  bool lost_ = false;
  std::string lost_reason_;
  std::string full_reason_;

  // The I/O thread writes `oldest_`, and the watchdog reads it. Only the watchdog uses the two members that
  // follow `oldest_`.
  std::atomic<uint64_t> oldest_{0};  // sequence number of the oldest job in flight; 0: none is in flight
  uint64_t seen_oldest_ = 0;
  int32_t quiet_looks_ = 0;

  // Only the I/O thread uses the members from here on.

  // At most `depth` of these jobs have I/Os in flight. The other jobs are free or in `arrived_`.
  std::vector<Job> jobs_;
  std::vector<size_t> free_jobs_;
  std::deque<size_t> arrived_;  // jobs whose I/Os have finished and whose pages are not reported yet
  std::vector<Io> ios_;
  std::vector<size_t> free_ios_;
  std::deque<size_t> unsubmitted_;
  uint64_t next_sequence_ = 1;
  int32_t in_flight_ = 0;       // number of I/Os in flight
  int32_t running_jobs_ = 0;    // number of jobs with unfinished I/Os
  int32_t running_writes_ = 0;  // number of writes among the running jobs
  int64_t running_bytes_ = 0;   // total size of the running jobs' I/Os
  std::optional<ZeroFill> zero_fill_;
  int32_t reads_in_row_ = 0;  // number of consecutive reads that have been begun before a waiting write
  int32_t read_errors_in_row_ = 0;
  int32_t write_errors_in_row_ = 0;
  bool full_ = false;  // whether full_reason_ is set; the I/O thread reads this without taking the lock
  // Whether even a write to an allocated slot failed because the disk was full. This happens on file systems
  // that write every update to a new location (copy-on-write).
  bool full_with_space_ = false;
  Clock::time_point full_until_{};  // before this time, writes to slots without allocated space fail at once
  // Why the I/O thread is about to take the disk out of service; empty if it is not.
  std::string pending_out_;
};

}  // namespace flexkv
