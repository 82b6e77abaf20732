// Checks arguments that are objects of bound classes. If such an argument is None, the call raises TypeError
// before the function runs. It also does so if the argument is an object whose __init__ has not run (made by
// `cls.__new__(cls)`, or still under construction in another thread). pybind11 alone would pass a null
// pointer for None and uninitialised memory for such an object.
//
// Every file that binds such a class, or has a function that takes such an object, must include this header.
// An argument that may be None is a std::optional.
#pragma once
#include <pybind11/pybind11.h>

#include <concepts>
#include <memory>
#include <string>

namespace flexkv {

namespace cuda {
class CudaLane;
class DeviceMemory;
}  // namespace cuda

class BlockIndex;
class BoundaryLookup;
class DiskLane;
class EngineKeyChain;
class GDSManager;
class GdsLane;
class HostMover;
class HostPool;
class KvView;
class Lane;
class PageCodec;
class PageConversion;
class PageMover;
class PeerDirectory;
class QueueWrapper;
class SlabFile;
class SlotBoard;
class SlotImage;
class TierLookup;
class TokenChain;
class TransferEngine;
struct Found;
struct FoundLengths;
struct GroupRule;
struct OpResult;
struct StreamPoint;

template <typename T, typename... List>
concept OneOf = (std::same_as<T, List> || ...);

// Whether T is a bound class that is checked. Another extension module adds its own classes by specialising
// this variable in its header.
template <typename T>
inline constexpr bool kIsNativeClass =
    OneOf<T, BlockIndex, BoundaryLookup, DiskLane, EngineKeyChain, Found, FoundLengths, GDSManager, GdsLane,
          GroupRule, HostMover, HostPool, KvView, Lane, OpResult, PageCodec, PageConversion, PageMover,
          PeerDirectory, QueueWrapper, SlabFile, SlotBoard, SlotImage, StreamPoint, TierLookup, TokenChain,
          TransferEngine, cuda::CudaLane, cuda::DeviceMemory>;

template <typename T>
concept NativeClass = kIsNativeClass<T>;

// Binds T as pybind11::class_ does, but compiles only if kIsNativeClass is true for T.
template <NativeClass T, typename... More>
using NativeBinding = pybind11::class_<T, More...>;

// Returns whether `object` is an instance of `type`; false for None and for objects of other classes. Throws
// TypeError if the object is such an instance, but its __init__ has not run.
inline bool is_whole(pybind11::handle object, const pybind11::detail::type_info* type) {
  if (type == nullptr || object.is_none()) return false;
  if (PyObject_TypeCheck(object.ptr(), type->type) == 0) return false;
  auto* instance = reinterpret_cast<pybind11::detail::instance*>(object.ptr());
  for (auto& part : pybind11::detail::values_and_holders(instance)) {
    if (part.holder_constructed()) continue;
    throw pybind11::type_error(std::string("an object of ") + Py_TYPE(object.ptr())->tp_name +
                               " whose __init__ has not run: make it by calling the class");
  }
  return true;
}

}  // namespace flexkv

namespace pybind11::detail {

template <flexkv::NativeClass T>
class type_caster<T> : public type_caster_base<T> {
 public:
  bool load(handle object, bool convert) {
    return flexkv::is_whole(object, this->typeinfo) && type_caster_base<T>::load(object, convert);
  }
};

template <flexkv::NativeClass T>
class type_caster<std::shared_ptr<T>> : public copyable_holder_caster<T, std::shared_ptr<T>> {
 public:
  bool load(handle object, bool convert) {
    return flexkv::is_whole(object, this->typeinfo) &&
           copyable_holder_caster<T, std::shared_ptr<T>>::load(object, convert);
  }
};

}  // namespace pybind11::detail
