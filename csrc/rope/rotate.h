// Rotates keys from old to new positions and scatters them to their destinations in one pass, on the CPU or a
// GPU. rope/rotation.h has the arithmetic.
#pragma once
#include <cstdint>
#include <string>

#include "rope/rotation.h"

namespace flexkv {

enum class ElementType : int32_t { kFloat32, kBfloat16, kFloat16 };

constexpr int64_t element_bytes(ElementType type) { return type == ElementType::kFloat32 ? 4 : 2; }

// Rotates rows in host memory on the calling thread, with vector instructions if the processor has them. When
// the function returns, all bytes are visible to threads that synchronise with the calling thread.
void rotate_on_host(const RotationRows& rows, ElementType type, Pairing pairing);

// Enqueues one kernel launch of the rotation on `stream` (a cudaStream_t as a number). All arrays of `rows`
// are in the GPU's memory. Returns the error message of the launch, or an empty string on success. Throws
// ConfigError in a build without CUDA.
std::string rotate_on_gpu(const RotationRows& rows, ElementType type, Pairing pairing, uintptr_t stream);

}  // namespace flexkv
