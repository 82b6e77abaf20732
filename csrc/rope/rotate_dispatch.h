// Calls the template instance for an element type and a pairing that are known only at run time.
#pragma once
#include "rope/rotate.h"

namespace flexkv {

template <typename Type, Pairing kOf>
struct RotationKind {
  using Element = Type;
  static constexpr Pairing kPairing = kOf;
};

// Calls `run(RotationKind<Element, kPairing>{})`, where Element corresponds to `type`, and kPairing is the
// value of `pairing`.
template <typename Run>
void dispatch_rotation(ElementType type, Pairing pairing, const Run& run) {
  const auto with = [&]<typename Element>() {
    if (pairing == Pairing::kNeox) {
      run(RotationKind<Element, Pairing::kNeox>{});
    } else {
      run(RotationKind<Element, Pairing::kGptj>{});
    }
  };
  switch (type) {
    case ElementType::kFloat32:
      return with.template operator()<float>();
    case ElementType::kBfloat16:
      return with.template operator()<Bfloat16>();
    case ElementType::kFloat16:
      return with.template operator()<Float16>();
  }
}

}  // namespace flexkv
