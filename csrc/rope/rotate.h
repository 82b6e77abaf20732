// Runs a rotation (rope/rotation.h) on the CPU or a GPU: turns keys from old to new positions and scatters
// them, in one pass.
#pragma once
#include <cstdint>
#include <string>

#include "rope/rotation.h"

namespace flexkv {

enum class ElementType : int32_t { kFloat32, kBfloat16, kFloat16 };

constexpr int64_t element_bytes(ElementType type) { return type == ElementType::kFloat32 ? 4 : 2; }

// Rotates rows in plain memory on the calling thread, with vector instructions. When it returns, all bytes
// are visible to threads that synchronise with this one.
void rotate_on_host(const RotationRows& rows, ElementType type, Pairing pairing);

// Enqueues one launch on `stream` (a cudaStream_t as a number). All arrays are in memory of the GPU. Returns
// the launch's error, empty on success. Throws ConfigError in a build without CUDA.
std::string rotate_on_gpu(const RotationRows& rows, ElementType type, Pairing pairing, uintptr_t stream);

}  // namespace flexkv
