// The rule that says which pages of one KV group a hit needs.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/error.h"

namespace flexkv {

enum class RuleKind : uint8_t {
  kFull = 0,    // full attention: a hit needs every page of the prefix
  kWindow = 1,  // sliding window: a hit needs the last `reach` pages before its end
  // Chunked attention: a hit needs those of its pages that are in the same chunk as the next token.
  kChunk = 2,
  kState = 3,  // recurrent state: a hit needs the one page that ends where the hit ends
};

struct RuleName {
  RuleKind kind;
  std::string_view name;
};
inline constexpr std::array kRuleKinds{
    RuleName{RuleKind::kFull, "full"}, RuleName{RuleKind::kWindow, "window"},
    RuleName{RuleKind::kChunk, "chunk"}, RuleName{RuleKind::kState, "state"}};

// The rule of one group. Lengths are in tokens; page i of a group ends at token (i + 1) x block_tokens.
struct GroupRule {
  RuleKind kind = RuleKind::kFull;
  uint32_t block_tokens = 1;  // tokens per block
  uint32_t reach = 0;  // length of a window in pages, or length of a chunk in tokens; 0 for other kinds

  // Throws ConfigError if `block_tokens` is 0, if `reach` is 0 for a window or a chunk, or if `reach` is not
  // 0 for another kind.
  void check() const {
    const bool reaches = kind == RuleKind::kWindow || kind == RuleKind::kChunk;
    if (block_tokens > 0 && reaches == (reach > 0)) return;
    throw ConfigError("a rule with blocks of " + std::to_string(block_tokens) + " tokens and reach " +
                      std::to_string(reach) +
                      "; allowed are blocks of 1 token or more, and a reach for windows and chunks alone");
  }

  // Returns the number of the first page that a hit of `tokens` tokens needs if the inference engine already
  // has `start` tokens. For kState, a hit longer than `start` does not use the state at `start`: it needs the
  // state at its own end.
  size_t first_page(size_t start, size_t tokens) const {
    const size_t had = start / block_tokens;
    const size_t end = tokens / block_tokens;
    switch (kind) {
      case RuleKind::kWindow:
        return std::max(had, end - std::min<size_t>(end, reach));
      case RuleKind::kChunk:
        return std::max(had, tokens / reach * reach / block_tokens);
      case RuleKind::kState:
        return std::max(had, end - std::min<size_t>(end, 1));
      case RuleKind::kFull:
        break;
    }
    return had;
  }

  // Returns the maximum number of pages that a hit of up to `tokens` tokens can need. A greater value of
  // `tokens` never gives a smaller result.
  size_t most_pages(size_t start, size_t tokens) const {
    const size_t all = tokens / block_tokens - start / block_tokens;
    switch (kind) {
      case RuleKind::kWindow:
        return std::min<size_t>(all, reach);
      case RuleKind::kChunk:
        return std::min<size_t>(all, (reach + block_tokens - 1) / block_tokens);
      case RuleKind::kState:
        return std::min<size_t>(all, 1);
      case RuleKind::kFull:
        break;
    }
    return all;
  }
};

}  // namespace flexkv
