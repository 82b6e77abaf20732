// The graphs that callers submit and the results that they poll. flexkv/transfer/graph.py has the same types,
// with the same numbers.
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

// A set of kinds, one bit each.
using KindSet = uint32_t;
// Returns the empty set for a number that is not a kind.
constexpr KindSet kind_bit(OpKind kind) {
  const auto bit = static_cast<uint32_t>(kind);
  return bit < kOpKinds ? KindSet{1} << bit : 0;
}
std::string to_string_set(KindSet kinds);

// Whether ops of this kind read or write the engine's blocks.
constexpr bool has_device_side(OpKind kind) {
  constexpr KindSet device = kind_bit(OpKind::kH2D) | kind_bit(OpKind::kD2H) | kind_bit(OpKind::kGdsRead) |
                             kind_bit(OpKind::kGdsWrite);
  return (device & kind_bit(kind)) != 0;
}

// Whether ops of this kind name a place and a tag for each page.
constexpr bool has_places(OpKind kind) {
  constexpr KindSet disk = kind_bit(OpKind::kDiskRead) | kind_bit(OpKind::kDiskWrite) |
                           kind_bit(OpKind::kGdsRead) | kind_bit(OpKind::kGdsWrite) |
                           kind_bit(OpKind::kDiskSeal);
  return (disk & kind_bit(kind)) != 0;
}

// Whether ops of this kind read or write slots of the host pool. Such an op has as many pages as slots, one
// of another kind as many as places.
constexpr bool has_host_side(OpKind kind) {
  constexpr KindSet none =
      kind_bit(OpKind::kGdsRead) | kind_bit(OpKind::kGdsWrite) | kind_bit(OpKind::kDiskSeal);
  return (none & kind_bit(kind)) == 0;
}

// Unit: bytes. The size of a page's tag, which says which page its place holds or will hold. Opaque to the
// scheduler.
inline constexpr size_t kTagBytes = 40;

// Lower runs first.
enum class Priority : int32_t { kLoad = 0, kStore = 1 };
inline constexpr int kPriorities = 2;

enum class EdgeKind : int32_t {
  kBarrier = 0,  // `after` starts when every page of `before` ended OK
  kStream = 1,   // page i of `after` may start when page i of `before` ended OK
};

struct OpSpec {
  int64_t op_id = 0;
  OpKind kind = OpKind::kH2D;
  int32_t group = 0;
  Priority priority = Priority::kLoad;
  std::vector<int32_t> blocks;  // one per page, or none for a kind without a device side
  std::vector<int32_t> slots;   // one per page, or none for a kind without a host side
  bool layerwise = false;
  std::vector<int32_t> places = {};    // one per page if has_places(kind), else none
  std::vector<uint8_t> tags = {};      // kTagBytes for each place
  std::vector<uint64_t> digests = {};  // kDiskSeal: for every run of all ranks, page by page
  // kH2D: for each page the number of the kDiskRead that fills its slot, perhaps on another transfer engine,
  // or kNoRead if the slot is filled already. Empty: all slots are filled. A layerwise op moves a layer of a
  // page once that layer is verified.
  std::vector<int64_t> reads = {};
  size_t pages() const { return has_host_side(kind) ? slots.size() : places.size(); }
};

struct EdgeSpec {
  int32_t before = 0;
  int32_t after = 0;
  EdgeKind kind = EdgeKind::kBarrier;
};

struct GraphSpec {
  std::vector<OpSpec> ops;
  std::vector<EdgeSpec> edges;
  // A point after the work that had been enqueued on the engine's stream at submit: a device lane starts
  // after it.
  std::shared_ptr<StreamEvent> fence = nullptr;
  // For stores of layers that the engine has yet to write: no byte of a layer is read before open_layers()
  // names it.
  bool gated = false;
};

// The terminal result of one op.
struct OpResult {
  int64_t op_id = 0;
  int64_t ticket = 0;
  Status status = Status::kOk;
  std::vector<int32_t> failed;  // positions of pages that must not be used, ascending
  std::string reason;
  std::vector<uint64_t> digests = {};     // kGdsWrite: for this rank's runs, page by page; 0 for failed pages
  size_t digest_runs = 0;                 // per page
  std::vector<FailureCause> causes = {};  // one for each page in `failed`
};

}  // namespace flexkv
