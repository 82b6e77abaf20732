#include "share/guarded_copy.h"

#include <atomic>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace flexkv {
namespace {

using SharedWord = std::atomic<uint64_t>;
static_assert(sizeof(SharedWord) == 8 && SharedWord::is_always_lock_free);

// Writes a word. On x86-64 the write bypasses the caches, so that a copied page does not evict other data
// from the caches.
inline void put_word(std::byte* to, uint64_t word) {
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
  _mm_stream_si64(reinterpret_cast<long long*>(to), static_cast<long long>(word));
#else
  std::memcpy(to, &word, 8);
#endif
}

inline void end_words() {
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
  _mm_sfence();
#endif
}

}  // namespace

void copy_words(std::byte* to, const std::byte* from, size_t bytes) {
  const auto* words = reinterpret_cast<const SharedWord*>(from);
  const size_t whole = bytes / 8;
  for (size_t i = 0; i < whole; ++i) put_word(to + i * 8, words[i].load(std::memory_order_acquire));
  end_words();
  if (bytes % 8 == 0) return;
  // The last word is read completely. The read stays inside the page's slot, because slot sizes are multiples
  // of 4 KiB.
  const uint64_t last = words[whole].load(std::memory_order_acquire);
  std::memcpy(to + whole * 8, &last, bytes % 8);
}

bool row_holds(const BoardRow& row, const RowFacts& asked, uint64_t& version) {
  const auto facts = read_row(row, version);
  if (!facts || facts->key != asked.key || facts->group != asked.group || facts->tokens != asked.tokens) {
    return false;
  }
  return facts->expiry == 0 || (asked.expiry != 0 && asked.expiry <= facts->expiry);
}

}  // namespace flexkv
