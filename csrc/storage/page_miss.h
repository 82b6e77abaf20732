// The reasons why a lane does not deliver a page that an op should read.
#pragma once
#include <array>
#include <cstdint>
#include <string>

#include "base/status.h"

namespace flexkv {

enum class PageMiss : int32_t {
  kNone = 0,    // no miss: the page is delivered
  kTrailer,     // the trailer is damaged or was never written
  kVersion,     // the trailer has a different format version
  kElsewhere,   // the trailer records a different slot or slab
  kGroup,       // the slot contains a page of a different KV group that shares the slab
  kKey,         // the slot contains a page with a different key
  kGeneration,  // the page has the right key, but is of a different write than the one in the index
  kEpoch,       // the page was written in a different epoch, that is, with different weights
  kTokens,      // the page has a different number of valid tokens
  kExpired,     // the page has expired
  kData,        // the trailer is undamaged, but the bytes of a run do not match their digest
  kShort,       // the read returned fewer bytes than requested
  kIo,          // the read failed with an error
  kDiskLost,    // the disk was taken out of service before the page was read or written
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

// The result of checking a page.
struct PageCheck {
  PageMiss miss = PageMiss::kNone;
  std::string reason = {};  // explanation for log messages; empty for kNone
};

}  // namespace flexkv
