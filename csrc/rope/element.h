// The element types of keys that can be rotated, and their conversions. Conversions to float are exact;
// conversions from float round. g++ and nvcc both compile this file. The conversions have no branches, so
// that g++ can vectorise them.
#pragma once
#include <cstdint>
#include <cstring>

#include "base/host_device.h"

namespace flexkv {

struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

namespace element_detail {

FLEXKV_HD inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
FLEXKV_HD inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace element_detail

FLEXKV_HD inline float to_float(float value) { return value; }

FLEXKV_HD inline float to_float(Bfloat16 value) {
  return element_detail::float_of(static_cast<uint32_t>(value.bits) << 16);
}

// A multiplication by 2^112 adjusts the exponent's bias; the result is exact for subnormals, too.
FLEXKV_HD inline float to_float(Float16 value) {
  using namespace element_detail;
  const uint32_t half = value.bits;
  constexpr uint32_t kTwoTo112 = 0x77800000u;
  const uint32_t scaled = bits_of(float_of((half & 0x7FFFu) << 13) * float_of(kTwoTo112));
  const uint32_t special = (half & 0x7C00u) == 0x7C00u ? 0x7F800000u : 0u;  // nonzero for infinity and NaN
  return float_of(scaled | special | (half & 0x8000u) << 16);
}

// The overloads of from_float() round to nearest, ties to even. A NaN stays a NaN.
FLEXKV_HD inline void from_float(float value, float& to) { to = value; }

FLEXKV_HD inline void from_float(float value, Bfloat16& to) {
  const uint32_t bits = element_detail::bits_of(value);
  const uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
  const uint32_t quiet = bits >> 16 | 0x40u;
  to.bits = static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded);
}

FLEXKV_HD inline void from_float(float value, Float16& to) {
  using namespace element_detail;
  const uint32_t signed_bits = bits_of(value);
  const uint32_t bits = signed_bits & 0x7FFFFFFFu;
  constexpr uint32_t kTooLarge = 0x47800000u;   // 2^16
  constexpr uint32_t kNormalMin = 0x38800000u;  // 2^-14, the smallest normal number
  constexpr uint32_t kAligner = 0x3F000000u;    // 1/2; adding it rounds a subnormal into the lowest bits
  const uint32_t special = bits > 0x7F800000u ? 0x7E00u | (bits >> 13 & 0x3FFu) : 0x7C00u;
  const uint32_t subnormal = bits_of(float_of(bits) + float_of(kAligner)) - kAligner;
  const uint32_t normal = (bits - 0x38000000u + 0xFFFu + (bits >> 13 & 1u)) >> 13;
  const uint32_t finite = bits < kNormalMin ? subnormal : normal;
  const uint32_t magnitude = bits >= kTooLarge ? special : finite;
  to.bits = static_cast<uint16_t>(magnitude | (signed_bits >> 16 & 0x8000u));
}

}  // namespace flexkv
