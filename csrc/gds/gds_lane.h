// GDS_READ and GDS_WRITE of one rank: staged transfers between blocks of the engine's pool and their stripe
// of slab pages, without a page in the host pool.
//
// A read verifies pages as the disk lane does: the trailer before a byte leaves the staging slot for the
// pool, the digests while the bytes move there. A layerwise read brings one range of layers of all its pages,
// then the next; for each range it reads and checks the trailers again, so that no range trusts an earlier
// one. A write moves the stripe alone and reports the digests of its runs. The manager collects the digests
// of all ranks, and the page exists once its DISK_SEAL has written the trailer.
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
  int32_t device = -1;  // index in the manager; -1 if the disk is lost
  SlabShape shape = {};
  int32_t file = 0;  // index among the device's files
};

// One KV group and its slabs, one per disk. Groups that share slabs name slabs of the same ids.
struct GdsGroup {
  std::shared_ptr<const PageCodec> codec;
  std::vector<GdsSlab> slabs;
};

// Unit: bytes. The most that one transfer moves: its last work item may exceed kMostTransferBytes.
int64_t most_gds_transfer_bytes();

class GdsLane : public Lane {
 public:
  // `manager` has opened each slab file once. `stripe`: the rank whose stripe moves. Place p of a group is
  // slot p / disks of disk p % disks. Throws ContractError and GeometryError.
  GdsLane(std::vector<GdsGroup> groups, int32_t stripe, std::shared_ptr<GDSManager> manager);
  ~GdsLane() override { abandon(); }

  const char* name() const override { return "gds"; }
  KindSet kinds() const override { return kind_bit(OpKind::kGdsRead) | kind_bit(OpKind::kGdsWrite); }
  int32_t concurrency() const override { return 1; }
  PageSizes check(const OpSpec& op) const override;
  // Registers the memory of `view`, which the group will use, and allocates the staging that its pages need.
  // Throws ContractError for an unknown group, GeometryError if the view's stripe has another size, and
  // CapacityError, which says which setting to change.
  void reserve_staging(int32_t group, const KvView& view);
  // See GDSManager. Precondition: no op is under way.
  void release_pool();
  void restore_pool();
  // Closes the slabs and frees the staging. Only a lane without a transfer engine needs this call, because an
  // engine closes its lanes. Later transfers fail. Idempotent.
  void close();
  void start(std::shared_ptr<WorkSource> source, int32_t lane) override;
  bool needs_stream() const override { return device_ != nullptr; }
  std::shared_ptr<StreamEvent> record(StreamId stream) override;
  void join() override;
  void abandon() override;

  const DiskCounts& counts() const;
  const GDSManager& manager() const;

 private:
  struct Shared;  // shared with the thread, which may outlive this

  std::shared_ptr<Shared> shared_;
  std::shared_ptr<cuda::Device> device_;  // null for plain memory
  std::thread thread_;
};

}  // namespace flexkv
