// Describes where the runs of a KV group's blocks lie in one rank's pool. A run is a contiguous range of a
// block's bytes. The data plane uses no other information about the pool. run_address() in segment.h computes
// a run's address from the block's number.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "layout/segment.h"

namespace flexkv {

// A view of one rank's pool. It is immutable. It holds addresses of the pool's memory, but does not own the
// memory: the code that attaches a view must keep the pool alive.
class KvView {
 public:
  // `runs` may be in any order. Adjacent runs are not merged. Blocks have the numbers [first_block,
  // num_blocks); `first_block` may be positive because SGLang reserves page 0. Throws GeometryError if a size
  // is not positive, if the runs do not fill [0, stripe_bytes) of the stripe exactly, or if two runs of any
  // blocks share a byte of the pool.
  KvView(std::vector<Segment> runs, int64_t num_blocks, int64_t stripe_bytes, int64_t first_block = 0);

  // The uncoalesced runs, in ascending order of page offsets. Each run has a digest of its own.
  const std::vector<Segment>& runs() const { return runs_; }
  // The coalesced runs, in ascending order of page offsets: runs that follow each other both in the pool and
  // in the page are merged. Copies loop over these segments.
  const std::vector<Segment>& segments() const { return segments_; }
  // Returns the coalesced runs of layers [lo, hi) only. Throws BlockRangeError unless
  // 0 <= lo < hi <= num_layers().
  std::vector<Segment> segments_of_layers(int32_t lo, int32_t hi) const;

  int32_t num_layers() const { return num_layers_; }
  int64_t first_block() const { return first_block_; }
  int64_t num_blocks() const { return num_blocks_; }
  int64_t stripe_bytes() const { return stripe_bytes_; }

  bool has_block(int64_t block) const { return block >= first_block_ && block < num_blocks_; }
  // Throws BlockRangeError if the view does not have the block. `what`: the word for the block in the error
  // message.
  void require_block(int64_t block, const char* what = "block") const;

  // Repeats the constructor's checks. Throws GeometryError if any of them fails.
  void check() const;

 private:
  std::vector<Segment> runs_;
  std::vector<Segment> segments_;
  int64_t num_blocks_;
  int64_t stripe_bytes_;
  int64_t first_block_;
  int32_t num_layers_ = 0;
};

// Merges runs that follow each other both in the pool and in the page (see continues()). Precondition: `runs`
// are in ascending order of page offsets.
std::vector<Segment> coalesce(const std::vector<Segment>& runs);

std::string to_string(const Segment& segment);

}  // namespace flexkv
