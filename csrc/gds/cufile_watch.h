// How each of our calls to cuFile went. cuFile counts for the whole process, so what it counted is asked when
// the first of several overlapping calls begins and when the last has ended (a window): where all of it went
// one way, all calls of the window did.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>

#include "gds/cufile_statistics.h"
#include "gds/file_io.h"

namespace flexkv {

struct CufileCalls {
  int64_t direct = 0;
  int64_t bounced = 0;
  int64_t unknown = 0;  // nothing was counted, or calls of one window went different ways
};

class CufileWatch {
 public:
  // How a file's calls went when that was last seen; kUnknown until then.
  using Route = std::shared_ptr<std::atomic<IoRoute>>;

  explicit CufileWatch(std::function<std::optional<CufileOps>()> read) : read_(std::move(read)) {}

  void begin();
  // Of a call on `file` (null for memory that is not registered, which says nothing of the file): how it
  // went, as far as its window is over and says so.
  IoRoute end(const Route& file);
  // Of all windows that are over.
  CufileCalls calls() const;

 private:
  std::function<std::optional<CufileOps>()> read_;
  mutable std::mutex mutex_;
  std::optional<CufileOps> before_;
  int64_t in_flight_ = 0;
  int64_t window_calls_ = 0;
  std::set<Route> window_files_;
  CufileCalls calls_;
};

}  // namespace flexkv
