// Reads any Python sequence safely. The code holds a reference to each item while it converts the item,
// limits the length, and reports an error if the sequence shrinks during the conversion. pybind11's own
// caster would reserve memory for as many items as `__len__` claims.
#pragma once
#include <pybind11/pybind11.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"

namespace flexkv {

// Unit: items. The maximum length of a sequence. A longer sequence is a mistake by the caller. It may even be
// endless, so that converting it would use up all memory.
inline constexpr size_t kMostListItems = size_t{1} << 20;

template <typename T>
struct List : std::vector<T> {};

// Whether `object` is a sequence other than str and bytes.
inline bool is_list(pybind11::handle object) {
  return PySequence_Check(object.ptr()) != 0 && PyUnicode_Check(object.ptr()) == 0 &&
         PyBytes_Check(object.ptr()) == 0;
}

// Calls `visit(item)` for each item of a sequence until `visit` returns false. Returns whether all items were
// visited. Throws ContractError if the sequence is too long or shrinks in the meantime. Also throws any
// exception that the sequence's own methods raise.
template <typename Visit>
bool visit_items(pybind11::handle sequence, Visit visit) {
  const Py_ssize_t length = PySequence_Size(sequence.ptr());
  if (length < 0) throw pybind11::error_already_set();
  if (static_cast<size_t>(length) > kMostListItems) {
    throw ContractError("a sequence of " + std::to_string(length) + " items; allowed are up to " +
                        std::to_string(kMostListItems));
  }
  for (Py_ssize_t i = 0; i < length; ++i) {
    const auto item = pybind11::reinterpret_steal<pybind11::object>(PySequence_GetItem(sequence.ptr(), i));
    if (!item) {
      if (PyErr_ExceptionMatches(PyExc_IndexError) == 0) throw pybind11::error_already_set();
      PyErr_Clear();
      throw ContractError("a sequence of " + std::to_string(length) + " items became shorter than " +
                          std::to_string(i + 1) + " while it was read");
    }
    if (!visit(item)) return false;
  }
  return true;
}

}  // namespace flexkv

namespace pybind11::detail {

template <typename T>
class type_caster<flexkv::List<T>> {
 public:
  PYBIND11_TYPE_CASTER(flexkv::List<T>,
                       const_name("collections.abc.Sequence[") + make_caster<T>::name + const_name("]"));

  bool load(handle sequence, bool convert) {
    if (!flexkv::is_list(sequence)) return false;
    value.clear();
    return flexkv::visit_items(sequence, [&](const object& item) {
      make_caster<T> caster;
      if (!caster.load(item, convert)) return false;
      value.push_back(cast_op<T&&>(std::move(caster)));
      return true;
    });
  }
};

}  // namespace pybind11::detail
