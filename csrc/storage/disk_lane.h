// DISK_READ, DISK_WRITE and DISK_SEAL of one ownership unit: spreads pages over its disks, which work at the
// same time and fail alone.
#pragma once
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "storage/disk.h"
#include "transfer/lane.h"

namespace flexkv {

struct DiskState {
  bool lost = false;
  std::string reason = {};   // why it was taken out
  std::string backend = {};  // "io_uring" or "threads"; empty before first use
  std::string note = {};     // what keeps it from being what was asked for
};

class DiskLane : public Lane {
 public:
  // `slabs[d][g]` holds the pages of group g on disk d: place p of a group is slot p / disks of disk
  // p % disks. Groups that share slabs have the same one on each disk, and the places of one are those of
  // all. A disk without slabs is lost from the start. Throws GeometryError when the slots of a pool or slab
  // have another size than the largest image that lies in them, DiskError when io_uring is asked for and
  // refused.
  DiskLane(std::vector<DiskGroup> groups, std::vector<std::vector<std::shared_ptr<SlabFile>>> slabs,
           const DiskOptions& options, WrapQueue wrap = nullptr);
  ~DiskLane() override { abandon(); }

  const char* name() const override { return "disk"; }
  KindSet kinds() const override {
    return kind_bit(OpKind::kDiskRead) | kind_bit(OpKind::kDiskWrite) | kind_bit(OpKind::kDiskSeal);
  }
  int32_t concurrency() const override;
  PageSizes check(const OpSpec& op) const override;
  bool watches_itself() const override { return true; }
  void read_ended(const OpSpec& op, int32_t page, bool verified) override;
  void read_advanced(const OpSpec& op, int32_t page, int32_t layers) override;
  void start(std::shared_ptr<WorkSource> source, int32_t lane) override;
  void join() override;
  void abandon() override;

  // Its places are misses from now on. Throws BlockRangeError for a disk that is not there.
  void take_out(int32_t disk, const std::string& reason);
  std::vector<DiskState> states() const;
  // Of each disk why it takes no page where it has no space yet; empty while it does.
  std::vector<std::string> full_reasons() const;
  const DiskCounts& counts(int32_t disk) const;
  int32_t disks() const;
  // Whether idle disks write zeros ahead.
  bool zero_fill() const;
  // Whether join() has let the files go.
  bool files_closed() const;

 private:
  struct Shared;
  Disk& disk_at(int32_t disk) const;
  static void dispatch(const std::shared_ptr<Shared>& shared, const std::shared_ptr<WorkSource>& source,
                       int32_t lane);
  static void watch(const std::shared_ptr<Shared>& shared, const std::shared_ptr<WorkSource>& source);

  std::shared_ptr<Shared> shared_;  // with threads that may outlive this
  std::vector<std::thread> threads_;
};

}  // namespace flexkv
