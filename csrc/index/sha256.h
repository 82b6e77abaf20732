// SHA-256 (FIPS 180-4) with the CPU's SHA instructions if it has them; the portable form gives the same
// bytes.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

namespace flexkv {

using Sha256Digest = std::array<uint8_t, 32>;
using Sha256State = std::array<uint32_t, 8>;

inline constexpr size_t kSha256BlockBytes = 64;
inline constexpr Sha256State kSha256Init = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                            0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

// Folds `blocks` blocks of 64 bytes into `state`.
using Sha256Compress = void (*)(uint32_t* state, const uint8_t* data, size_t blocks);

void sha256_compress_portable(uint32_t* state, const uint8_t* data, size_t blocks);

// Folds one block of 64 bytes into each of two states.
using Sha256CompressPair = void (*)(uint32_t* first, const uint8_t* first_block, uint32_t* second,
                                    const uint8_t* second_block);

// Null if the compiler or this CPU has no SHA instructions.
Sha256Compress sha256_native_compress();
Sha256CompressPair sha256_native_compress_pair();

// The fastest form that this CPU runs; resolved once.
Sha256Compress sha256_compress();
Sha256CompressPair sha256_compress_pair();

// A hash in progress. Copyable, so that a common prefix is hashed once and continued many times.
class Sha256 {
 public:
  explicit Sha256(Sha256Compress compress = sha256_compress()) : compress_(compress) {}

  void update(const void* data, size_t bytes);

  // Ends the hash; the object must not be used afterwards.
  Sha256Digest finish();

  // The state after the whole blocks so far. Only meaningful if a multiple of 64 bytes was given.
  const Sha256State& state() const { return state_; }

 private:
  Sha256Compress compress_;
  Sha256State state_ = kSha256Init;
  uint64_t total_bytes_ = 0;
  size_t pending_bytes_ = 0;
  std::array<uint8_t, kSha256BlockBytes> pending_{};
};

Sha256Digest sha256_digest(const Sha256State& state);

}  // namespace flexkv
