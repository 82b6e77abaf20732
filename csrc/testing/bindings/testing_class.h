// Declares this module's classes to bindings/native_class.h. Include this header before code that binds one
// of these classes or takes one as an argument.
#pragma once
#include "bindings/native_class.h"

namespace flexkv {

class CountingMover;
class FaultyMover;
class IoFaults;
struct FaultRule;
struct IoFaultRule;

template <>
inline constexpr bool kIsNativeClass<CountingMover> = true;
template <>
inline constexpr bool kIsNativeClass<FaultyMover> = true;
template <>
inline constexpr bool kIsNativeClass<IoFaults> = true;
template <>
inline constexpr bool kIsNativeClass<FaultRule> = true;
template <>
inline constexpr bool kIsNativeClass<IoFaultRule> = true;

}  // namespace flexkv
