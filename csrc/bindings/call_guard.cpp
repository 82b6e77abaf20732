#include "bindings/call_guard.h"

#include <exception>

namespace py = pybind11;

namespace flexkv {
namespace {

using Dispatcher = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*);

// pybind11's own dispatcher, which is the same for all functions of a module.
Dispatcher dispatcher = nullptr;

// Calls pybind11's dispatcher, and converts an exception that leaves the dispatcher to a TypeError. This
// function must neither be noexcept nor catch (...): if a thread ends while it waits for the GIL, its stack
// is unwound through this function.
PyObject* guarded(PyObject* self, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
  try {
    return dispatcher(self, arguments, count, names);
  } catch (const std::exception& error) {  // includes pybind11's error_already_set
    PyErr_Format(PyExc_TypeError, "arguments that fit no signature and cannot be shown: %s", error.what());
  }
  return nullptr;
}

void guard(py::handle function) {
  if (!function || PyCFunction_Check(function.ptr()) == 0) return;
  PyMethodDef* def = reinterpret_cast<PyCFunctionObject*>(function.ptr())->m_ml;
  if ((def->ml_flags & (METH_VARARGS | METH_FASTCALL | METH_KEYWORDS)) != (METH_FASTCALL | METH_KEYWORDS))
    return;
  const auto given = reinterpret_cast<Dispatcher>(reinterpret_cast<void (*)()>(def->ml_meth));
  if (given == guarded || (dispatcher != nullptr && given != dispatcher)) return;
  dispatcher = given;
  def->ml_meth = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(guarded));
}

// Guards the functions of one member of a class or module. A property may have two functions, one for reading
// and one for writing.
void guard_member(py::handle member) {
  if (PyInstanceMethod_Check(member.ptr()) != 0) {
    guard(PyInstanceMethod_GET_FUNCTION(member.ptr()));
  } else if (Py_TYPE(member.ptr()) == &PyStaticMethod_Type) {
    guard(py::object(member.attr("__func__")));
  } else if (PyObject_TypeCheck(member.ptr(), &PyProperty_Type) != 0) {
    for (const char* part : {"fget", "fset"}) {
      const py::object function = member.attr(part);
      guard(PyInstanceMethod_Check(function.ptr()) != 0
                ? py::handle(PyInstanceMethod_GET_FUNCTION(function.ptr()))
                : py::handle(function));
    }
  } else {
    guard(member);
  }
}

}  // namespace

void guard_calls(py::module_& m) {
  for (const auto& [name, value] : py::dict(m.attr("__dict__"))) {
    if (PyType_Check(value.ptr()) == 0) {
      guard_member(value);
      continue;
    }
    for (const auto& [member_name, member] : py::dict(value.attr("__dict__"))) guard_member(member);
  }
}

}  // namespace flexkv
