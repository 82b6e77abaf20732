// The lane that executes the ops DISK_READ, DISK_WRITE and DISK_SEAL for one ownership unit. It spreads pages
// over the unit's disks, which work at the same time and fail independently of each other.
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
  std::string reason = {};   // why the disk was taken out of service; empty if it was not
  std::string backend = {};  // "io_uring" or "threads"; empty before the disk's I/O thread has started
  std::string note = {};     // how the backend differs from the requested one; empty if it does not
};

class DiskLane : public Lane {
 public:
  // `slabs[d][g]`: the slab of group g on disk d. Place p of a group is slot p / disks on disk p % disks.
  // Groups that share places have the same slab on each disk. If `slabs[d]` is empty, disk d counts as lost
  // from the start. Throws GeometryError if the slot size of a pool or slab differs from the size of the
  // largest image that it stores, DiskError if io_uring is requested but the kernel refuses it, ConfigError
  // if the depth is out of range, and ContractError if a group or a slab is missing.
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

  // Takes a disk out of service: from then on, ops fail for the pages whose places are on this disk. Throws
  // BlockRangeError if there is no such disk.
  void take_out(int32_t disk, const std::string& reason);
  std::vector<DiskState> states() const;
  // Returns the result of Disk::full_reason() for each disk.
  std::vector<std::string> full_reasons() const;
  const DiskCounts& counts(int32_t disk) const;
  int32_t disks() const;
  // Whether idle disks write zeros to slots that will be written next (DiskOptions::zero_fill).
  bool zero_fill() const;
  // Whether join() has closed all files. False if the I/O thread of a disk hung.
  bool files_closed() const;

 private:
  struct Shared;
  Disk& disk_at(int32_t disk) const;
  static void dispatch(const std::shared_ptr<Shared>& shared, const std::shared_ptr<WorkSource>& source,
                       int32_t lane);
  static void watch(const std::shared_ptr<Shared>& shared, const std::shared_ptr<WorkSource>& source);

  std::shared_ptr<Shared> shared_;  // shared with threads that may outlive the lane
  std::vector<std::thread> threads_;
};

}  // namespace flexkv
