#include "transfer/op.h"

namespace flexkv {

const char* to_string(OpKind kind) {
  static constexpr const char* kNames[kOpKinds] = {"H2D",      "D2H",       "DISK_READ", "DISK_WRITE",
                                                   "GDS_READ", "GDS_WRITE", "DISK_SEAL"};
  const auto number = static_cast<int>(kind);
  return number >= 0 && number < kOpKinds ? kNames[number] : "unknown";
}

std::string to_string_set(KindSet kinds) {
  std::string text;
  for (int i = 0; i < kOpKinds; ++i) {
    const auto kind = static_cast<OpKind>(i);
    if ((kinds & kind_bit(kind)) == 0) continue;
    text += (text.empty() ? "" : ", ") + std::string(to_string(kind));
  }
  return text.empty() ? "none" : text;
}

}  // namespace flexkv
