#include "transfer/lane.h"

#include <string>

#include "base/error.h"

namespace flexkv {

PageSizes Lane::check(const OpSpec& op) const {
  throw ContractError(std::string("lane ") + name() + " needs a view for " + to_string(op.kind));
}

}  // namespace flexkv
