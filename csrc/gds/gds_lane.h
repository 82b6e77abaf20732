// GDS_READ and GDS_WRITE of one rank: blocks of the engine's pool to and from their stripe of slab pages, by
// staged transfers, without a page of the host pool.
//
// A read verifies what it brings as the disk lane does: the trailer before a byte goes on to the pool, the
// digests on the way there. A write brings the stripe only and reports the digests of its runs; the page
// exists when a DISK_SEAL of the manager, which is told the digests of all ranks, has written its trailer.
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
  int32_t device = -1;  // of the manager; -1 where the disk is lost
  SlabShape shape = {};
  int32_t file = 0;  // of the device's files
};

// One KV group: its slabs, one a disk; groups that share slabs have the same ones, by their ids.
struct GdsGroup {
  std::shared_ptr<const PageCodec> codec;
  std::vector<GdsSlab> slabs;
};

// Unit: bytes. What one transfer takes at most: see kMostTransferBytes; the last piece of it may go beyond.
int64_t most_gds_transfer_bytes();

class GdsLane : public Lane {
 public:
  // `manager` has the slab files, each once. `stripe`: the rank whose stripe is moved. Place p of a group is
  // slot p / disks of disk p % disks. Throws ContractError and GeometryError.
  GdsLane(std::vector<GdsGroup> groups, int32_t stripe, std::shared_ptr<GDSManager> manager);
  ~GdsLane() override { abandon(); }

  const char* name() const override { return "gds"; }
  KindSet kinds() const override { return kind_bit(OpKind::kGdsRead) | kind_bit(OpKind::kGdsWrite); }
  int32_t concurrency() const override { return 1; }
  PageSizes check(const OpSpec& op) const override;
  // Takes the staging that pages of this view, which will be the group's, need. Throws ContractError for
  // another group, GeometryError for another stripe, and CapacityError, which says what to set.
  void reserve_staging(int32_t group, const KvView& view);
  // Closes the slabs and frees the staging: of a lane that no transfer engine was given, which closes its
  // own. What comes after fails. Idempotent.
  void close();
  void start(std::shared_ptr<WorkSource> source, int32_t lane) override;
  bool needs_stream() const override { return device_ != nullptr; }
  std::shared_ptr<StreamEvent> record(StreamId stream) override;
  void join() override;
  void abandon() override;

  const DiskCounts& counts() const;
  const GDSManager& manager() const;

 private:
  struct Shared;  // with a thread that may outlive this

  std::shared_ptr<Shared> shared_;
  std::shared_ptr<cuda::Device> device_;  // null for plain memory
  std::thread thread_;
};

}  // namespace flexkv
