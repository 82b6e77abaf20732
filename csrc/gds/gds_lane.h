// The lane of one rank's GDS_READ and GDS_WRITE ops. These ops move blocks between the inference engine's
// pool and the rank's stripe of pages in slabs (files on the disks), without using the host pool.
//
// A read op verifies pages as the disk lane does. If a page is staged, the lane checks the trailer before it
// moves any byte from the staging slot to the pool, and checks the digests while the bytes move to the pool.
// If a page is read directly into the pool, the lane checks trailer and digests afterwards. A layerwise read
// op brings one range of layers of all its pages, then the next range. For each range it reads and checks the
// trailers again, so that no range relies on the check of an earlier range. A write op writes only the
// stripe, not the trailer, and reports the digests of the stripe's runs. The cache's manager collects the
// digests of all ranks. The page exists once its DISK_SEAL op has written the trailer with these digests.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "cuda/device.h"
#include "gds/gds_manager.h"
#include "storage/disk.h"
#include "transfer/lane.h"

namespace flexkv {

struct GdsSlab {
  int32_t device = -1;  // index of the disk in the GDS manager; -1 if the disk is lost
  SlabShape shape = {};
  int32_t file = 0;  // number of the slab's file on that disk
};

// One KV group and its slabs, one per disk. Groups that share slabs list slabs with the same ids.
struct GdsGroup {
  std::shared_ptr<const PageCodec> codec;
  std::vector<GdsSlab> slabs;
};

// Unit: bytes. Returns the maximum size of one transfer. This is more than kMostTransferBytes, because a
// transfer's last work item may go beyond that limit.
int64_t most_gds_transfer_bytes();

class GdsLane : public Lane {
 public:
  // Precondition: `manager` has opened each slab file once. `stripe` is the number of the rank whose stripe
  // the lane moves. A group's disk slot p is slot p / disks on disk p % disks. Throws ContractError if groups
  // or slabs are missing, and GeometryError if a slab's slots do not have the size of the slot images.
  GdsLane(std::vector<GdsGroup> groups, int32_t stripe, std::shared_ptr<GDSManager> manager);
  ~GdsLane() override { abandon(); }

  const char* name() const override { return "gds"; }
  KindSet kinds() const override { return kind_bit(OpKind::kGdsRead) | kind_bit(OpKind::kGdsWrite); }
  int32_t concurrency() const override { return 1; }
  PageSizes check(const OpSpec& op) const override;
  // Registers the memory of `view`, to and from which the group's pages will move, and allocates the staging
  // memory that these pages need. Throws ContractError if there is no such group, GeometryError if the view's
  // runs differ from the slabs' runs, and CapacityError, which says which setting to change.
  void reserve_staging(int32_t group, const KvView& view);
  // release_pool() and restore_pool() call the functions of GDSManager that have the same names.
  // Precondition: no op is in flight.
  void release_pool();
  void restore_pool();
  // Closes the slabs and frees the staging memory. Later transfers fail. Needs to be called only for a lane
  // without a transfer engine, because a transfer engine closes its lanes. Further calls have no effect.
  void close();
  void start(std::shared_ptr<WorkSource> source, int32_t lane) override;
  bool needs_stream() const override { return device_ != nullptr; }
  std::shared_ptr<StreamEvent> record(StreamId stream) override;
  void join() override;
  void abandon() override;

  const DiskCounts& counts() const;
  const GDSManager& manager() const;

 private:
  struct Shared;  // shared with the lane's thread, which may outlive the lane

  std::shared_ptr<Shared> shared_;
  std::shared_ptr<cuda::Device> device_;  // null if the pool is in plain memory
  std::thread thread_;
};

}  // namespace flexkv
