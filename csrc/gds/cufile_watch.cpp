#include "gds/cufile_watch.h"

#include <utility>

namespace flexkv {
namespace {

IoRoute route_of(const std::optional<CufileOps>& before, const std::optional<CufileOps>& after) {
  if (!before || !after) return IoRoute::kUnknown;
  // The counts shrink if other code in this process resets the statistics between the two readings.
  if (after->direct < before->direct || after->bounced < before->bounced) return IoRoute::kUnknown;
  const bool direct = after->direct > before->direct;
  const bool bounced = after->bounced > before->bounced;
  if (direct == bounced) return IoRoute::kUnknown;
  return direct ? IoRoute::kDirect : IoRoute::kBounced;
}

}  // namespace

std::optional<CufileOps> CufileWatch::begin() {
  const std::lock_guard lock(mutex_);
  return read_();
}

IoRoute CufileWatch::end(const std::optional<CufileOps>& before, const Route& file, bool moved) {
  const std::lock_guard lock(mutex_);
  IoRoute route = IoRoute::kBounced;
  if (file != nullptr) {
    route = moved ? route_of(before, read_()) : IoRoute::kUnknown;
    if (route != IoRoute::kUnknown) {
      file->store(route);
    } else {
      route = unseen_;
    }
  }
  switch (route) {
    case IoRoute::kDirect:
      calls_.direct += 1;
      break;
    case IoRoute::kBounced:
      calls_.bounced += 1;
      break;
    case IoRoute::kUnknown:
      calls_.unknown += 1;
      break;
  }
  return route;
}

CufileCalls CufileWatch::calls() const {
  const std::lock_guard lock(mutex_);
  return calls_;
}

}  // namespace flexkv
