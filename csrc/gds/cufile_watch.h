// Finds out the route of each of flexkv's calls to cuFile. cuFile counts the operations of the whole process,
// so CufileWatch reads the counts before and after a call. If all operations between the two readings took
// the same route, the call took this route, too, even if other calls ran at the same time.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "gds/cufile_statistics.h"
#include "gds/file_io.h"

namespace flexkv {

struct CufileCalls {
  int64_t direct = 0;
  int64_t bounced = 0;
  int64_t unknown = 0;  // cuFile counted nothing, or concurrent calls took both routes
};

class CufileWatch {
 public:
  // The route of a file's calls when it was last observed; kUnknown if it never was.
  using Route = std::shared_ptr<std::atomic<IoRoute>>;

  // `unseen`: the route that is recorded for a call if the counts do not show the call's route.
  explicit CufileWatch(std::function<std::optional<CufileOps>()> read, IoRoute unseen = IoRoute::kUnknown)
      : read_(std::move(read)), unseen_(unseen) {}

  // Reads the counts before a call. Returns nothing if cuFile does not count its calls.
  std::optional<CufileOps> begin();
  // Returns the route of a call on `file`. `before` is what begin() returned. `moved`: whether the call moved
  // any bytes; cuFile does not count a call that moved none. For memory that is not registered, `file` is
  // null: a call on such memory is bounced, because its DMA ends in one of cuFile's buffers. So the call
  // shows nothing about the file's route.
  IoRoute end(const std::optional<CufileOps>& before, const Route& file, bool moved);
  // The number of calls so far, by route.
  CufileCalls calls() const;

 private:
  std::function<std::optional<CufileOps>()> read_;
  const IoRoute unseen_;
  mutable std::mutex mutex_;
  CufileCalls calls_;
};

}  // namespace flexkv
