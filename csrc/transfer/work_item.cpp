#include "transfer/work_item.h"

#include <span>

namespace flexkv {

PageMove WorkItem::page(size_t index) const {
  const OpSpec& spec = op_->spec();
  const int32_t position = positions_[index];
  const auto at = static_cast<size_t>(position);
  PageMove move;
  move.op_id = spec.op_id;
  move.kind = kind_;
  move.position = position;
  move.block = spec.blocks.empty() ? -1 : spec.blocks[at];
  move.slot = spec.slots.empty() ? -1 : spec.slots[at];
  move.view = view_.get();
  move.group = spec.group;
  if (!spec.places.empty()) {
    move.place = spec.places[at];
    move.tag = spec.tags.data() + at * kTagBytes;
    const size_t digests = spec.digests.size() / spec.places.size();
    move.digests = std::span(spec.digests).subspan(at * digests, digests);
  }
  return move;
}

}  // namespace flexkv
