// The exceptions of the native core. The bindings convert each of them to the corresponding class in
// flexkv/errors.py. Expected outcomes are Status values (base/status.h), never exceptions.
#pragma once
#include <stdexcept>
#include <string>

namespace flexkv {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

#define FLEXKV_ERROR_CLASS(Name) \
  class Name : public Error {    \
   public:                       \
    using Error::Error;          \
  }

FLEXKV_ERROR_CLASS(ConfigError);
FLEXKV_ERROR_CLASS(GeometryError);
FLEXKV_ERROR_CLASS(CapacityError);
FLEXKV_ERROR_CLASS(BlockRangeError);
FLEXKV_ERROR_CLASS(TokenError);
FLEXKV_ERROR_CLASS(KeySchemeError);
FLEXKV_ERROR_CLASS(ClosedError);
FLEXKV_ERROR_CLASS(ContractError);
FLEXKV_ERROR_CLASS(TransferError);
FLEXKV_ERROR_CLASS(DiskError);

#undef FLEXKV_ERROR_CLASS

}  // namespace flexkv
