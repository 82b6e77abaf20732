// Copies a page that another process may overwrite at any time. The copy is valid only if the page's row on
// the board had the same version before and after the copy.
#pragma once
#include <cstddef>
#include <cstdint>

#include "index/block_key.h"
#include "share/slot_board.h"

namespace flexkv {

// How the copy of a page from a peer ended.
enum class PeerEnd : uint8_t {
  kOk = 0,
  kAbsent = 1,   // no peer has the page now
  kChanged = 2,  // the peer wrote the page's slot, or gave it to another page, during the copy
  kDigest = 3,   // a run does not match its digest
  kFormat = 4,   // the peer stores its pages in a different format, so the caller has to convert the page
};

// Copies `bytes` bytes word by word from memory that another process may be writing. Every load has acquire
// order, so that a later load of the row's version cannot be reordered before the loads of the page. `from`
// and `to` must be aligned to 8 bytes.
void copy_words(std::byte* to, const std::byte* from, size_t bytes);

// Whether `row` says that its slot holds the page `asked`, and that the page expires no earlier than
// `asked.expiry`. Sets `version` to the row's version.
bool row_holds(const BoardRow& row, const RowFacts& asked, uint64_t& version);

inline bool row_is_at(const BoardRow& row, uint64_t version) {
  return row.version.load(std::memory_order_relaxed) == version;
}

}  // namespace flexkv
