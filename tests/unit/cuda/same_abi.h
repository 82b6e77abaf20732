// Compares declarations at compile time. Two declarations count as the same if a caller that was compiled
// with one of them can call a function that was compiled with the other.
#pragma once
#include <cstddef>
#include <type_traits>
#include <utility>

namespace abi {

// A test specialises this for two structures if the test compares their members itself, or if they are opaque
// types behind handles.
template <typename Ours, typename Theirs>
struct SameStruct : std::is_same<Ours, Theirs> {};

template <typename Ours, typename Theirs>
struct Same;

template <typename Ours, typename Theirs>
constexpr bool same() {
  return Same<std::remove_cv_t<Ours>, std::remove_cv_t<Theirs>>::value;
}

template <typename Type>
constexpr bool is_number = std::is_integral_v<Type> || std::is_enum_v<Type>;

// Numbers must have the same size and signedness. If one of them is an enumeration, signedness does not
// matter: the compiler chooses the type of a C library's enumeration, and this project declares an int.
template <typename Ours, typename Theirs>
constexpr bool same_number() {
  if constexpr (is_number<Ours> && is_number<Theirs>) {
    if (sizeof(Ours) != sizeof(Theirs)) return false;
    if (std::is_enum_v<Ours> || std::is_enum_v<Theirs>) return true;
    return std::is_signed_v<Ours> == std::is_signed_v<Theirs>;
  }
  return false;
}

template <typename Ours, typename Theirs>
struct Same : std::bool_constant<same_number<Ours, Theirs>() || SameStruct<Ours, Theirs>::value> {};

// A void pointer counts as the same as any other pointer.
template <typename Ours, typename Theirs>
struct Same<Ours*, Theirs*>
    : std::bool_constant<std::is_void_v<Ours> || std::is_void_v<Theirs> || same<Ours, Theirs>()> {};

template <typename Result, typename... Arguments, typename Other, typename... Others>
struct Same<Result(Arguments...), Other(Others...)> {
  static constexpr bool arguments() {
    if constexpr (sizeof...(Arguments) == sizeof...(Others)) {
      return (same<Arguments, Others>() && ...);
    }
    return false;
  }
  static constexpr bool value =
      ((std::is_void_v<Result> && std::is_void_v<Other>) || same<Result, Other>()) && arguments();
};

}  // namespace abi

#define CHECK_FUNCTION(table, field, name)                                                   \
  static_assert(abi::same<decltype(std::declval<table&>().field), decltype(&name)>(), #field \
                " is "                                                                       \
                "not " #name)
#define CHECK_MEMBER(ours, member, theirs, other)                                                   \
  static_assert(offsetof(ours, member) == offsetof(theirs, other), #member " is elsewhere");        \
  static_assert(                                                                                    \
      abi::same<decltype(std::declval<ours&>().member), decltype(std::declval<theirs&>().other)>(), \
      #member " is of another type")
#define CHECK_VALUE(ours, theirs) \
  static_assert(static_cast<long long>(ours) == static_cast<long long>(theirs), #ours " is not " #theirs)
