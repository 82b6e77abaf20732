// Which pages of one group a hit needs.
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
  kFull = 0,    // full attention: every page of the prefix
  kWindow = 1,  // sliding window: the last pages before the hit's end
  kChunk = 2,   // chunked attention: the pages from the start of the end's chunk on
  kState = 3,   // recurrent state: the one page that ends where the hit ends
};

struct RuleName {
  RuleKind kind;
  std::string_view name;
};
inline constexpr std::array kRuleKinds{
    RuleName{RuleKind::kFull, "full"}, RuleName{RuleKind::kWindow, "window"},
    RuleName{RuleKind::kChunk, "chunk"}, RuleName{RuleKind::kState, "state"}};

// Lengths are tokens; page i of a group ends at token (i + 1) x block_tokens.
struct GroupRule {
  RuleKind kind = RuleKind::kFull;
  uint32_t block_tokens = 1;
  uint32_t reach = 0;  // a window's length in pages, or a chunk's in tokens

  // Throws ConfigError for a meaningless rule.
  void check() const {
    const bool reaches = kind == RuleKind::kWindow || kind == RuleKind::kChunk;
    if (block_tokens > 0 && reaches == (reach > 0)) return;
    throw ConfigError("a rule with blocks of " + std::to_string(block_tokens) + " tokens and reach " +
                      std::to_string(reach) +
                      "; allowed are blocks of 1 token or more, and a reach for windows and chunks alone");
  }

  // The first page that a hit of `tokens` needs if the engine already has `start` tokens. A state at `start`
  // does not help a longer hit, which needs the state at its own end.
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

  // The most pages that a hit of up to `tokens` may need. Monotonic in `tokens`.
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
