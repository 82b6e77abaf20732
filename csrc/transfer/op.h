// The graphs that callers submit to the transfer engine, and the results that they poll.
// flexkv/transfer/graph.py has the same types with the same enum values.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "transfer/stream_event.h"

namespace flexkv {

enum class OpKind : int32_t {
  kH2D = 0,
  kD2H = 1,
  kDiskRead = 2,
  kDiskWrite = 3,
  kGdsRead = 4,
  kGdsWrite = 5,
  kDiskSeal = 6,
};
inline constexpr int kOpKinds = 7;
const char* to_string(OpKind kind);

// A set of op kinds, with one bit per kind.
using KindSet = uint32_t;
// Returns the set that contains only `kind`; the empty set if `kind` is not a valid kind.
constexpr KindSet kind_bit(OpKind kind) {
  const auto bit = static_cast<uint32_t>(kind);
  return bit < kOpKinds ? KindSet{1} << bit : 0;
}
std::string to_string_set(KindSet kinds);

// Whether ops of this kind read or write the inference engine's blocks.
constexpr bool has_device_side(OpKind kind) {
  constexpr KindSet device = kind_bit(OpKind::kH2D) | kind_bit(OpKind::kD2H) | kind_bit(OpKind::kGdsRead) |
                             kind_bit(OpKind::kGdsWrite);
  return (device & kind_bit(kind)) != 0;
}

// Whether each page of an op of this kind has a place (the disk slot that it is read from or written to) and
// a tag.
constexpr bool has_places(OpKind kind) {
  constexpr KindSet disk = kind_bit(OpKind::kDiskRead) | kind_bit(OpKind::kDiskWrite) |
                           kind_bit(OpKind::kGdsRead) | kind_bit(OpKind::kGdsWrite) |
                           kind_bit(OpKind::kDiskSeal);
  return (disk & kind_bit(kind)) != 0;
}

// Whether ops of this kind read or write slots of the host pool. If so, an op has one host slot per page; if
// not, an op has one place per page.
constexpr bool has_host_side(OpKind kind) {
  constexpr KindSet none =
      kind_bit(OpKind::kGdsRead) | kind_bit(OpKind::kGdsWrite) | kind_bit(OpKind::kDiskSeal);
  return (none & kind_bit(kind)) == 0;
}

// Unit: bytes. The size of a tag (PageTag). A tag identifies the page that is in a place, or the page that
// will be written there. The scheduler does not interpret tags.
inline constexpr size_t kTagBytes = 40;

// Ops with a lower number run first.
enum class Priority : int32_t { kLoad = 0, kStore = 1 };
inline constexpr int kPriorities = 2;

enum class EdgeKind : int32_t {
  kBarrier = 0,  // `after` starts when all pages of `before` have finished OK
  kStream = 1,   // page i of `after` may start when page i of `before` has finished OK
};

struct OpSpec {
  int64_t op_id = 0;
  OpKind kind = OpKind::kH2D;
  int32_t group = 0;
  Priority priority = Priority::kLoad;
  // The inference engine's block of each page; empty unless has_device_side(kind).
  std::vector<int32_t> blocks;
  std::vector<int32_t> slots;  // host slot of each page; empty unless has_host_side(kind)
  bool layerwise = false;
  std::vector<int32_t> places = {};    // place (disk slot) of each page; empty unless has_places(kind)
  std::vector<uint8_t> tags = {};      // kTagBytes for each place
  std::vector<uint64_t> digests = {};  // for kDiskSeal only: digests of all ranks' runs, page by page
  // For kH2D only: for each page, the id of the kDiskRead op that fills the page's slot, or kNoRead if the
  // slot is already filled. The kDiskRead op may belong to another transfer engine. Empty: all slots are
  // filled. A layerwise op moves a layer of a page as soon as the read op has verified that layer.
  std::vector<int64_t> reads = {};
  size_t pages() const { return has_host_side(kind) ? slots.size() : places.size(); }
};

// A dependency between two ops of a graph, given by their positions in GraphSpec::ops.
struct EdgeSpec {
  int32_t before = 0;
  int32_t after = 0;
  EdgeKind kind = EdgeKind::kBarrier;
};

struct GraphSpec {
  std::vector<OpSpec> ops;
  std::vector<EdgeSpec> edges;
  // A point in the inference engine's stream. Device lanes start the graph's copies after this point. If
  // null, and if submit() is given a stream, submit() records a point after the work enqueued so far.
  std::shared_ptr<StreamEvent> fence = nullptr;
  // Whether the graph stores layers that the inference engine has not written yet. Then no byte of a layer is
  // read before open_layers() opens the layer.
  bool gated = false;
};

// The terminal result of one op.
struct OpResult {
  int64_t op_id = 0;
  int64_t ticket = 0;
  Status status = Status::kOk;
  std::vector<int32_t> failed;  // positions of the pages that must not be used, in ascending order
  std::string reason;           // why pages failed; empty if none did
  // For kGdsWrite only: digests of this rank's runs, page by page; 0 for each run of a page without digests.
  std::vector<uint64_t> digests = {};
  size_t digest_runs = 0;                 // number of digests per page
  std::vector<FailureCause> causes = {};  // the cause for each page in `failed`
};

}  // namespace flexkv
