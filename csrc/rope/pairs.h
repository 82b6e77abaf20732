// Rotates pairs of a head one by one. The vectorised code leaves some pairs to this code: the pairs after the
// last complete vector, and pairs for which the vectorised code would give wrong bits.
#pragma once
#include "rope/rotation.h"

namespace flexkv {

// Rotates pairs [first, end) of a head that has `half` pairs. `dst` may be `src`.
template <typename Element, Pairing kPairing>
inline void turn_pairs(Element* dst, const Element* src, const float* cosines, const float* sines,
                       int32_t first, int32_t end, int32_t half) {
  constexpr bool kHalves = kPairing == Pairing::kNeox;
  for (int32_t i = first; i < end; ++i) {
    const int32_t x = kHalves ? i : 2 * i;
    const int32_t y = kHalves ? half + i : 2 * i + 1;
    const Pair turned = turn_pair({to_float(src[x]), to_float(src[y])}, cosines[i], sines[i]);
    from_float(turned.x, dst[x]);
    from_float(turned.y, dst[y]);
  }
}

}  // namespace flexkv
