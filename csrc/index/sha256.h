// SHA-256 (FIPS 180-4). It uses the SHA instructions of x86-64 CPUs that have them; other CPUs run a portable
// function with the same result.
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

// Runs SHA-256's compression function over `blocks` blocks of 64 bytes and updates `state`.
using Sha256Compress = void (*)(uint32_t* state, const uint8_t* data, size_t blocks);

void sha256_compress_portable(uint32_t* state, const uint8_t* data, size_t blocks);

// Compresses one block of 64 bytes of each of two messages, and updates the state of each.
using Sha256CompressPair = void (*)(uint32_t* first, const uint8_t* first_block, uint32_t* second,
                                    const uint8_t* second_block);

// The next two functions return null if the CPU is not an x86-64 CPU with SHA instructions.
Sha256Compress sha256_native_compress();
Sha256CompressPair sha256_native_compress_pair();

// The next two functions return the version that uses SHA instructions if the CPU has these instructions,
// otherwise the portable version. The choice is made once per process.
Sha256Compress sha256_compress();
Sha256CompressPair sha256_compress_pair();

// A hash in progress. The object can be copied: if many messages begin with the same bytes, these bytes have
// to be hashed only once.
class Sha256 {
 public:
  explicit Sha256(Sha256Compress compress = sha256_compress()) : compress_(compress) {}

  void update(const void* data, size_t bytes);

  // Returns the digest of all bytes that were passed to this object. The object must not be used afterwards.
  Sha256Digest finish();

  // The state after all complete 64-byte blocks so far. It includes all bytes that were passed only if their
  // number is a multiple of 64.
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
