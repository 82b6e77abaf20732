// A zeroed array of fixed size in its own memory mapping. It asks the kernel for huge pages, because random
// accesses to tens of MiB in 4 KiB memory pages cause as many TLB misses as cache misses. Memory pages that
// are never accessed take no memory.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "base/error.h"

namespace flexkv {

template <class T>
class HugeArray {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

 public:
  explicit HugeArray(size_t size) : size_(size) {
    mapped_bytes_ = (size * sizeof(T) + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
    void* got = ::mmap(nullptr, mapped_bytes_ + kHugePageBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) {
      throw CapacityError("the block index needs " + std::to_string(mapped_bytes_) +
                          " bytes of address space and got none");
    }
    mapping_ = static_cast<char*>(got);
    const auto at = reinterpret_cast<uintptr_t>(mapping_);
    data_ = reinterpret_cast<T*>((at + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes);
    // A small array does not get a huge page, because it would waste most of it. If the kernel refuses the
    // advice, the array works, but more slowly.
    if (size * sizeof(T) >= kHugePageBytes) ::madvise(data_, mapped_bytes_, MADV_HUGEPAGE);
  }
  ~HugeArray() { ::munmap(mapping_, mapped_bytes_ + kHugePageBytes); }
  HugeArray(const HugeArray&) = delete;
  HugeArray& operator=(const HugeArray&) = delete;

  size_t size() const { return size_; }
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }
  void prefetch(size_t i) const { __builtin_prefetch(data_ + i); }

  // Zeroes all elements and returns their memory to the kernel.
  void zero() {
    if (::madvise(data_, mapped_bytes_, MADV_DONTNEED) != 0) {
      std::memset(static_cast<void*>(data_), 0, size_ * sizeof(T));
    }
  }

 private:
  static constexpr size_t kHugePageBytes = size_t{2} << 20;

  size_t size_;
  size_t mapped_bytes_ = 0;
  char* mapping_ = nullptr;
  T* data_ = nullptr;
};

}  // namespace flexkv
