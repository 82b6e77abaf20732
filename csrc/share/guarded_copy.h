// Copies a page that another process may overwrite at any time. The other process publishes a board, a list
// with one row per slot. The copy is valid only if the row of the page's slot had the same version before and
// after the copy.
#pragma once
#include <cstddef>
#include <cstdint>

#include "index/block_key.h"
#include "share/slot_board.h"

namespace flexkv {

// The result of copying a page from a peer (another unit on this machine).
enum class PeerEnd : uint8_t {
  kOk = 0,
  kAbsent = 1,   // no peer has the page at this time
  kChanged = 2,  // during the copy, the peer wrote the page's slot or gave it to another page
  kDigest = 3,   // the bytes of a run do not match its digest
  // The peer stores pages in a different format, so the caller has to convert the page.
  kFormat = 4,
};

// Copies `bytes` bytes word by word from memory that another process may be writing. Every load of a word has
// acquire order. So if the caller then loads the version of the page's row, that load cannot be reordered
// before the loads of the page. `from` and `to` must be aligned to 8 bytes.
void copy_words(std::byte* to, const std::byte* from, size_t bytes);

// Returns whether, according to `row`, the slot holds the page `asked`, and the page does not expire before
// `asked.expiry`. Sets `version` to the row's version.
bool row_holds(const BoardRow& row, const RowFacts& asked, uint64_t& version);

inline bool row_is_at(const BoardRow& row, uint64_t version) {
  return row.version.load(std::memory_order_relaxed) == version;
}

}  // namespace flexkv
