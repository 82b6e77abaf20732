#include "transfer/host_lane.h"

#include <pthread.h>

#include <exception>

#include "base/nvtx.h"

namespace flexkv {
namespace {

MoveResult move_page(PageMover& mover, const WorkItem& item, size_t index) {
  try {
    return mover.move(item.page(index), item.layer_lo(), item.layer_hi());
  } catch (const std::exception& error) {
    return {Status::kFailed, error.what()};
  }
}

void run(const std::shared_ptr<WorkSource>& source, const std::shared_ptr<PageMover>& mover, int32_t lane) {
  std::vector<MoveResult> results;
  while (const std::shared_ptr<WorkItem> item = source->take(lane)) {
    results.clear();
    const nvtx::Range range("flexkv copy");
    for (size_t i = 0; i < item->positions().size(); ++i) {
      results.push_back(move_page(*mover, *item, i));
      item->touch();
    }
    source->finish(item, results);
  }
}

}  // namespace

void HostLane::start(std::shared_ptr<WorkSource> source, int32_t lane) {
  while (running_.size() <
         static_cast<size_t>(threads_)) {  // if an earlier call threw, only the missing threads are started
    running_.emplace_back([source, mover = mover_, lane] { run(source, mover, lane); });
    pthread_setname_np(running_.back().native_handle(), "flexkv-copy");
  }
}

void HostLane::join() {
  for (std::thread& thread : running_) thread.join();
  running_.clear();
}

void HostLane::abandon() {
  for (std::thread& thread : running_) thread.detach();
  running_.clear();
}

}  // namespace flexkv
