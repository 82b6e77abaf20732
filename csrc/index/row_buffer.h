// An array of rows of equal length. Rows are appended and removed only at the end. Readers share the memory:
// while a reader holds `storage`, the rows that it saw stay valid and unchanged.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace flexkv {

class RowBuffer {
 public:
  explicit RowBuffer(size_t row_bytes) : row_bytes_(row_bytes) {}

  size_t rows() const { return rows_; }
  size_t row_bytes() const { return row_bytes_; }
  const uint8_t* row(size_t i) const { return storage_.get() + i * row_bytes_; }
  std::shared_ptr<uint8_t[]> storage() const { return storage_; }

  // Returns the address at which the caller may write up to `count` more rows; `commit` then adds the rows.
  uint8_t* reserve(size_t count) {
    if (rows_ + count > capacity_) move_to(std::max(rows_ + count, 2 * capacity_));
    return storage_.get() + rows_ * row_bytes_;
  }

  void commit(size_t count) { rows_ += count; }

  // Keeps only the first `rows` rows. Copies them to new storage, so that rows which are appended later do
  // not overwrite rows that readers still use.
  void truncate(size_t rows) {
    if (rows >= rows_) return;
    rows_ = rows;
    move_to(rows);
  }

 private:
  void move_to(size_t capacity) {
    auto storage = std::make_shared_for_overwrite<uint8_t[]>(capacity * row_bytes_);
    std::copy_n(storage_.get(), rows_ * row_bytes_, storage.get());
    storage_ = std::move(storage);
    capacity_ = capacity;
  }

  size_t row_bytes_;
  size_t rows_ = 0;
  size_t capacity_ = 0;
  std::shared_ptr<uint8_t[]> storage_;
};

}  // namespace flexkv
