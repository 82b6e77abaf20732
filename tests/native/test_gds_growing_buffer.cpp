// Tests when the small buffers of a transfer on a GPU are allocated and freed. A fake device memory records
// each allocation and each free.
#include <doctest/doctest.h>

#include <cstdlib>
#include <map>

#include "gds/transform/growing_buffer.h"

using namespace flexkv;

namespace {

struct CountedMemory {
  static std::map<void*, size_t> live;
  static size_t freed;
  static bool refuses;
  static std::string allocate(void** memory, size_t bytes) {
    if (refuses) return "CUDA error 2";
    *memory = std::malloc(bytes);
    live[*memory] = bytes;
    return {};
  }
  static void release(void* memory) {
    freed += 1;
    live.erase(memory);
    std::free(memory);
  }
};
std::map<void*, size_t> CountedMemory::live;
size_t CountedMemory::freed = 0;
bool CountedMemory::refuses = false;

}  // namespace

TEST_CASE("a growing buffer frees nothing while it lives, and all of it at its end") {
  size_t outgrown = 0;
  {
    GrowingBuffer<CountedMemory> buffer;
    for (size_t bytes = 100; bytes <= 100000; bytes += 100) {
      REQUIRE(buffer.reserve(bytes).empty());
      const size_t in_use = CountedMemory::live.at(buffer.as<void>());
      CHECK(in_use >= bytes);
      outgrown = 0;
      for (const auto& [memory, size] : CountedMemory::live)
        outgrown += memory == buffer.as<void>() ? 0 : size;
      CHECK(outgrown < in_use);
    }
    CHECK(CountedMemory::freed == 0);
    CHECK(CountedMemory::live.size() > 5);
    auto* kept = buffer.as<unsigned char>();
    kept[99999] = 7;
    CountedMemory::refuses = true;
    CHECK(buffer.reserve(1 << 20) == "CUDA error 2");
    CountedMemory::refuses = false;
    CHECK(buffer.as<unsigned char>() == kept);
    CHECK(kept[99999] == 7);
    CHECK(buffer.reserve(10).empty());
    CHECK(buffer.as<unsigned char>() == kept);
  }
  CHECK(CountedMemory::live.empty());
  CHECK(outgrown > 0);
}
