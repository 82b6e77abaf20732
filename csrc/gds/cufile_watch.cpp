#include "gds/cufile_watch.h"

#include <utility>

namespace flexkv {
namespace {

IoRoute route_of(const std::optional<CufileOps>& before, const std::optional<CufileOps>& after) {
  if (!before || !after) return IoRoute::kUnknown;
  // Somebody who resets the statistics meanwhile makes them smaller.
  if (after->direct < before->direct || after->bounced < before->bounced) return IoRoute::kUnknown;
  const bool direct = after->direct > before->direct;
  const bool bounced = after->bounced > before->bounced;
  if (direct == bounced) return IoRoute::kUnknown;
  return direct ? IoRoute::kDirect : IoRoute::kBounced;
}

}  // namespace

void CufileWatch::begin() {
  const std::lock_guard lock(mutex_);
  if (in_flight_ == 0) before_ = read_();
  in_flight_ += 1;
}

IoRoute CufileWatch::end(const Route& file) {
  const std::lock_guard lock(mutex_);
  in_flight_ -= 1;
  window_calls_ += 1;
  if (file != nullptr) window_files_.insert(file);
  if (in_flight_ > 0) return IoRoute::kUnknown;
  const IoRoute route = route_of(before_, read_());
  switch (route) {
    case IoRoute::kDirect:
      calls_.direct += window_calls_;
      break;
    case IoRoute::kBounced:
      calls_.bounced += window_calls_;
      break;
    case IoRoute::kUnknown:
      calls_.unknown += window_calls_;
      break;
  }
  if (route != IoRoute::kUnknown) {
    for (const Route& seen : window_files_) seen->store(route);
  }
  window_calls_ = 0;
  window_files_.clear();
  return route;
}

CufileCalls CufileWatch::calls() const {
  const std::lock_guard lock(mutex_);
  return calls_;
}

}  // namespace flexkv
