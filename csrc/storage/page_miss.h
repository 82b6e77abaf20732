// Why a requested page is not served.
#pragma once
#include <array>
#include <cstdint>
#include <string>

#include "base/status.h"

namespace flexkv {

enum class PageMiss : int32_t {
  kNone = 0,    // it is served
  kTrailer,     // the trailer is damaged, or was never written
  kVersion,     // written by another version of the format
  kElsewhere,   // the image of another slot or slab
  kGroup,       // a page of another KV group that shares the slab
  kKey,         // another block
  kGeneration,  // the same block, but from another write than the index names
  kEpoch,       // written under other weights
  kTokens,      // another number of valid tokens
  kExpired,     // past its time to live
  kData,        // the trailer is good, but the bytes of a run are not
  kShort,       // the file ended, or the disk moved fewer bytes than requested
  kIo,          // the disk reported an error
  kDiskLost,    // its disk was taken out
};
inline constexpr int kPageMisses = 14;

inline constexpr std::array<const char*, kPageMisses> kMissNames = {
    "none",  "trailer", "version", "elsewhere", "group", "key", "generation",
    "epoch", "tokens",  "expired", "data",      "short", "io",  "disk_lost"};

constexpr FailureCause failure_cause_of(PageMiss miss) {
  switch (miss) {
    case PageMiss::kShort:
    case PageMiss::kIo:
      return FailureCause::kSource;
    case PageMiss::kNone:
    case PageMiss::kDiskLost:
      return FailureCause::kTransport;
    default:
      return FailureCause::kContent;
  }
}

struct PageCheck {
  PageMiss miss = PageMiss::kNone;
  std::string reason = {};  // for people; empty for kNone
};

}  // namespace flexkv
