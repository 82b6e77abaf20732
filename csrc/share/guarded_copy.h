// Copies a page that another process may overwrite at any time: the copy counts only if the version of the
// page's row was the same before and after.
#pragma once
#include <cstddef>
#include <cstdint>

#include "index/block_key.h"
#include "share/slot_board.h"

namespace flexkv {

// Why a peer's page was not taken; kOk if it was.
enum class PeerEnd : uint8_t {
  kOk = 0,
  kAbsent = 1,   // no peer has the page now
  kChanged = 2,  // its slot was written, or given to another page, during the copy
  kDigest = 3,   // a run does not match its digest
  kFormat = 4,   // its holder keeps pages of another format, which the caller has to rewrite
};

// Copies `bytes` word by word from memory that another process may be writing. All loads acquire, so that a
// later read of the row's version cannot come before them. `from` and `to` lie on 8-byte boundaries.
void copy_words(std::byte* to, const std::byte* from, size_t bytes);

// Whether `row` names the requested page, expiring no earlier than requested; sets `version` to the row's
// version.
bool row_holds(const BoardRow& row, const RowFacts& asked, uint64_t& version);

inline bool row_is_at(const BoardRow& row, uint64_t version) {
  return row.version.load(std::memory_order_relaxed) == version;
}

}  // namespace flexkv
