#include "base/error.h"
#include "rope/rotate.h"

namespace flexkv {

std::string rotate_on_gpu(const RotationRows&, ElementType, Pairing, uintptr_t) {
  throw ConfigError("the keys are in memory of a GPU: this is a build without CUDA");
}

}  // namespace flexkv
