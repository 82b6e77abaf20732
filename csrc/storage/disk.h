// One disk of the tier: its queue of pages and the thread that owns its I/O. Reads go before writes. The
// thread checks the pages that it has read, and seals those that it writes, while other I/Os are under way:
// it checks a few arrived pages at a time and refills the queue in between.
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

// One KV group: the same on all disks.
struct DiskGroup {
  std::shared_ptr<const PageCodec> codec;
  std::vector<LayerReads> layer_reads;
  std::shared_ptr<HostPool> pool;
};

struct DiskOptions {
  IoBackend io = IoBackend::kAuto;
  int32_t depth = 32;
  double stuck_s = 30.0;
  // Whether io_uring keeps the host pools' pages pinned, instead of pinning them for each I/O.
  bool register_buffers = false;
  // Whether an idle disk writes zeros to slots that have space but were never written, before pages need
  // them.
  bool zero_fill = false;
};

struct DiskCounts {
  std::atomic<int64_t> read_pages{0}, read_bytes{0}, written_pages{0}, written_bytes{0}, write_errors{0},
      zeroed_bytes{0};
  std::array<std::atomic<int64_t>, kPageMisses> misses{};
};

// One page of a work item that the lane took.
struct PageTask {
  std::shared_ptr<WorkItem> item;
  size_t index = 0;
  PageMove move;
  int64_t slot = 0;  // of the disk's slab
};

class Disk {
 public:
  // `on_change` is called, from any thread and without a lock, after queued() has fallen or the disk was
  // lost.
  Disk(int32_t number, std::vector<std::shared_ptr<SlabFile>> slabs,
       std::shared_ptr<const std::vector<DiskGroup>> groups, const DiskOptions& options, WrapQueue wrap,
       std::function<void()> on_change);

  // Queues tasks; if the disk is lost, they end at once.
  void push(std::vector<PageTask> tasks, WorkSource& source);
  size_t queued() const;
  // A disk with at least this many queued pages needs no further pages for now.
  size_t room_below() const { return room_below_; }
  bool lost() const;
  std::string lost_reason() const;
  std::string backend() const;
  // How the backend differs from the requested one, and why; empty if it does not.
  std::string backend_note() const;
  // Why the disk is full: writes to slots that have no space of their own yet fail (or writes to any slot, if
  // even a slot with space of its own could not be written). Empty while there is space; the next write that
  // finds space clears it.
  std::string full_reason() const;
  // Begins no more I/O: queued pages end with LANE_DOWN at once, those under way when their I/O has ended.
  void take_out(const std::string& reason, WorkSource* source);
  // The watchdog calls this regularly. Returns true if the same job has been the oldest one under way in
  // `looks` consecutive calls.
  bool look(int32_t looks);

  // The body of the I/O thread; returns after stop(), when nothing is queued or under way.
  void run(const std::shared_ptr<WorkSource>& source);
  void stop();
  // Call after stop(). Whether run() has returned, or will return as soon as the pages under way end. False
  // if it is still in a write of zeros at `until`, which no work item waits for.
  bool will_end(Clock::time_point until);

  const DiskCounts& counts() const { return counts_; }
  // Releases the files. Precondition: run() has returned, was never called, or hangs in a write of zeros,
  // which holds its own references to the files.
  void close_files() { slabs_.clear(); }

 private:
  struct Job {
    PageTask task;
    const DiskGroup* group = nullptr;
    bool write = false;
    uint64_t sequence = 0;  // 0: free
    int64_t bytes = 0;      // of all its I/Os
    int32_t open_ios = 0;
    int32_t error = 0;                   // errno of the first I/O that failed
    int64_t missing = 0;                 // bytes that short I/Os did not move
    bool shows_room = false;             // a write begun while the disk is full; its success shows room
    const LayerReads* layers = nullptr;  // null: the whole image
    std::vector<std::byte*> span_at;     // where each span of the layers is read to
    std::unique_ptr<std::byte, void (*)(void*)> bounce{nullptr, nullptr};
  };
  struct Io {
    size_t job = 0;
    IoRequest request;
  };
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
  std::vector<std::shared_ptr<SlabFile>> slabs_;  // one per group; groups may share one
  const std::shared_ptr<const std::vector<DiskGroup>> groups_;
  const DiskOptions options_;
  const WrapQueue wrap_;  // none: the queue is not wrapped
  const std::function<void()> on_change_;
  const size_t room_below_;
  DiskCounts counts_;

  mutable std::mutex mutex_;  // guards the members up to the blank line
  std::condition_variable work_;
  std::deque<PageTask> reads_;
  std::deque<PageTask> writes_;
  IoQueue* queue_ = nullptr;  // while the thread may be in its wait()
  std::string backend_;
  std::string backend_note_;
  uint64_t pushes_ = 0;
  bool stopping_ = false;
  bool zero_filling_ = false;
  std::condition_variable zero_filled_;
  bool lost_ = false;
  std::string lost_reason_;
  std::string full_reason_;

  // The watchdog reads the first of these; only it uses the others.
  std::atomic<uint64_t> oldest_{0};  // the sequence of the oldest job under way; 0 for none
  uint64_t seen_oldest_ = 0;
  int32_t quiet_looks_ = 0;

  // Only the I/O thread uses these.
  std::vector<Job> jobs_;  // at most `depth` of them have I/Os; the others are in arrived_
  std::vector<size_t> free_jobs_;
  std::deque<size_t> arrived_;  // jobs whose I/Os have ended
  std::vector<Io> ios_;
  std::vector<size_t> free_ios_;
  std::deque<size_t> unsubmitted_;
  uint64_t next_sequence_ = 1;
  int32_t under_way_ = 0;     // I/Os
  int32_t running_jobs_ = 0;  // jobs that have I/Os; the next two count only these
  int32_t running_writes_ = 0;
  int64_t running_bytes_ = 0;
  std::optional<ZeroFill> zero_fill_;
  int32_t reads_in_row_ = 0;  // reads that have overtaken a waiting write
  int32_t read_errors_in_row_ = 0;
  int32_t write_errors_in_row_ = 0;
  bool full_ = false;  // whether full_reason_ is set; read without the lock
  // Whether a write to a slot with space of its own found the disk full. This happens on file systems that
  // write every update to a new place.
  bool full_with_space_ = false;
  Clock::time_point full_until_{};  // no write that needs space is tried before this time
  std::string pending_out_;         // why to take the disk out; set while a job ends
};

}  // namespace flexkv
