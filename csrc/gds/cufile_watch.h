// Finds out the route of each of our calls to cuFile. cuFile counts for the whole process, so the watch reads
// the counts before and after a call: if all operations between the two readings took one route, so did the
// call, whatever ran beside it.
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
  int64_t unknown = 0;  // nothing was counted, or concurrent calls went the other way
};

class CufileWatch {
 public:
  // The route of a file's calls when it was last observed; kUnknown until then.
  using Route = std::shared_ptr<std::atomic<IoRoute>>;

  // `unseen`: the route of calls whose route the counts do not show.
  explicit CufileWatch(std::function<std::optional<CufileOps>()> read, IoRoute unseen = IoRoute::kUnknown)
      : read_(std::move(read)), unseen_(unseen) {}

  // Returns the counts before a call; unset if nothing is counted.
  std::optional<CufileOps> begin();
  // Returns the route of a call on `file`. `before` is what begin() returned; `moved` says whether the call
  // moved bytes, because cuFile does not count a call that moved none. `file` is null for memory that is not
  // registered: such a call is bounced, since its DMA ends in one of cuFile's buffers and says nothing about
  // the file.
  IoRoute end(const std::optional<CufileOps>& before, const Route& file, bool moved);
  // Counts all calls that have ended.
  CufileCalls calls() const;

 private:
  std::function<std::optional<CufileOps>()> read_;
  const IoRoute unseen_;
  mutable std::mutex mutex_;
  CufileCalls calls_;
};

}  // namespace flexkv
