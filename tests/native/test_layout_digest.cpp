#include <doctest/doctest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "base/digest.h"
#include "layout/page_digest.h"
#include "testing/layout_lanes.h"

using namespace flexkv;

namespace {

std::vector<unsigned char> seeded_bytes(size_t n, uint64_t seed) {
  std::vector<unsigned char> bytes(n);
  for (size_t i = 0; i < n; ++i) bytes[i] = static_cast<unsigned char>(digest_mix(seed * 1000003 + i) >> 17);
  return bytes;
}

uint64_t digest(const std::vector<unsigned char>& bytes) { return run_digest(bytes.data(), bytes.size()); }

}  // namespace

TEST_CASE("every single-bit flip of a leaf, whole or short, changes the digest") {
  for (const size_t size : {size_t{4096}, size_t{1021}, size_t{5000}}) {
    auto bytes = seeded_bytes(size, size);
    const uint64_t good = digest(bytes);
    size_t missed = 0;
    for (size_t bit = 0; bit < size * 8; ++bit) {
      bytes[bit / 8] ^= static_cast<unsigned char>(1u << bit % 8);
      missed += digest(bytes) == good;
      bytes[bit / 8] ^= static_cast<unsigned char>(1u << bit % 8);
    }
    CHECK(missed == 0);
    CHECK(digest(bytes) == good);
  }
}

TEST_CASE("a flip is seen also where the other half of the keyed word is zero") {
  // If one half of the keyed word is 0, the product of the halves is 0 before and after a flip in the other
  // half. So only the sum of words changes.
  std::vector<unsigned char> bytes(4096);
  const uint64_t word = digest_constant(3);
  for (size_t i = 0; i < 4; ++i) bytes[24 + i] = static_cast<unsigned char>(word >> (8 * i));
  const uint64_t good = digest(bytes);
  for (size_t bit = 32; bit < 64; ++bit) {
    auto flipped = bytes;
    flipped[24 + bit / 8] ^= static_cast<unsigned char>(1u << bit % 8);
    CHECK(digest(flipped) != good);
  }
}

TEST_CASE("two flips of the same bit do not cancel") {
  const auto bytes = seeded_bytes(4096, 7);
  const uint64_t good = digest(bytes);
  size_t missed = 0;
  for (size_t bit = 0; bit < 64; ++bit) {
    for (size_t word = 1; word < 512; ++word) {
      auto flipped = bytes;
      flipped[bit / 8] ^= static_cast<unsigned char>(1u << bit % 8);
      flipped[word * 8 + bit / 8] ^= static_cast<unsigned char>(1u << bit % 8);
      missed += digest(flipped) == good;
    }
  }
  CHECK(missed == 0);
}

TEST_CASE("swapped words and swapped leaves are seen, equal ones are not") {
  auto bytes = seeded_bytes(4096 * 3, 2);
  const uint64_t good = digest(bytes);
  size_t missed = 0;
  for (size_t a = 0; a < 512; a += 3) {
    for (size_t b = a + 1; b < 512; ++b) {
      const auto swap = [&] {
        std::swap_ranges(bytes.begin() + static_cast<long>(a * 8),
                         bytes.begin() + static_cast<long>(a * 8 + 8),
                         bytes.begin() + static_cast<long>(b * 8));
      };
      swap();
      missed += digest(bytes) == good;
      swap();
    }
  }
  CHECK(missed == 0);
  std::swap_ranges(bytes.begin(), bytes.begin() + 4096, bytes.begin() + 8192);
  CHECK(digest(bytes) != good);
  std::swap_ranges(bytes.begin(), bytes.begin() + 4096, bytes.begin() + 8192);
  CHECK(digest(bytes) == good);
}

TEST_CASE("lengths differ: truncated runs, and zero runs of every length") {
  std::set<uint64_t> seen;
  const std::vector<unsigned char> zeros(3 * 4096 + 9);
  for (size_t n = 0; n <= zeros.size(); ++n) seen.insert(run_digest(zeros.data(), n));
  CHECK(seen.size() == zeros.size() + 1);
  const auto bytes = seeded_bytes(4096 * 2 + 100, 5);
  std::set<uint64_t> cut;
  for (size_t n = 0; n <= bytes.size(); ++n) cut.insert(run_digest(bytes.data(), n));
  CHECK(cut.size() == bytes.size() + 1);
}

TEST_CASE("AVX2, scalar and lane-by-lane agree at every size and alignment") {
  const auto bytes = seeded_bytes(5 * 4096 + 64, 11);
  for (size_t n = 0; n < 5 * 4096; n += (n < 600 || n % 4096 < 80 || n % 4096 > 4000) ? 1 : 61) {
    const unsigned char* at = bytes.data() + n % 17;
    const uint64_t expected = run_digest_scalar(at, n);
    REQUIRE(run_digest(at, n) == expected);
    REQUIRE(run_digest_lane_by_lane(at, static_cast<int64_t>(n)) == expected);
  }
}

TEST_CASE("published test vectors") {
  std::vector<unsigned char> counting(10000);
  for (size_t i = 0; i < counting.size(); ++i) counting[i] = static_cast<unsigned char>(i % 251);
  CHECK(digest_constant(0) == 0x2CB0F69F4ABEA221u);
  CHECK(run_digest(nullptr, 0) == 0x0000000000000000u);
  CHECK(run_digest(counting.data(), 1) == 0xFD7FD0573D5DABFBu);
  CHECK(run_digest(counting.data(), 8) == 0x52E5967DD214A70Bu);
  CHECK(run_digest(counting.data(), 4096) == 0x286F96E2107EDA93u);
  CHECK(run_digest(counting.data(), 10000) == 0x3C43AAB6C29C640Fu);
}

TEST_CASE("a page's digests restart at each run and do not depend on coalescing") {
  const auto stripe = seeded_bytes(3 * 5000, 9);
  std::vector<Segment> apart, together;
  for (int32_t layer = 0; layer < 3; ++layer) {
    apart.push_back({4096u + layer * 100000u, 5000, 5000, layer * 5000, layer});
    together.push_back({4096u + layer * 5000u, 15000, 5000, layer * 5000, layer});
  }
  const auto* bytes = reinterpret_cast<const std::byte*>(stripe.data());
  const auto digests = page_digests(KvView(apart, 10, 15000), bytes);
  CHECK(digests == page_digests(KvView(together, 10, 15000), bytes));
  REQUIRE(digests.size() == 3);
  for (size_t run = 0; run < 3; ++run) CHECK(digests[run] == run_digest(bytes + run * 5000, 5000));
}
