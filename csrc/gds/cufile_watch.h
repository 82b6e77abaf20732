// How each of our calls to cuFile went. cuFile counts for the whole process, so what it counted is asked when
// a call begins and when it has ended: where all of it went one way, the call did, whatever went on beside
// it.
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
  int64_t unknown = 0;  // nothing was counted, or calls beside it went another way
};

class CufileWatch {
 public:
  // How a file's calls went when that was last seen; kUnknown until then.
  using Route = std::shared_ptr<std::atomic<IoRoute>>;

  // `unseen`: how calls go of which what cuFile counts does not say it.
  explicit CufileWatch(std::function<std::optional<CufileOps>()> read, IoRoute unseen = IoRoute::kUnknown)
      : read_(std::move(read)), unseen_(unseen) {}

  // What was counted before a call; unset where nothing is.
  std::optional<CufileOps> begin();
  // How a call on `file` went that began at `before`, and which moved bytes or not: cuFile does not count one
  // that moved none. `file` is null for memory that is not registered: that call is bounced, since what is
  // counted as DMA ends in a buffer of cuFile's, and says nothing of the file.
  IoRoute end(const std::optional<CufileOps>& before, const Route& file, bool moved);
  // Of all that have ended.
  CufileCalls calls() const;

 private:
  std::function<std::optional<CufileOps>()> read_;
  const IoRoute unseen_;
  mutable std::mutex mutex_;
  CufileCalls calls_;
};

}  // namespace flexkv
