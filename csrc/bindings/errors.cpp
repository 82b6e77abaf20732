#include "bindings/errors.h"

#include <exception>
#include <new>
#include <stdexcept>
#include <string>

#include "base/error.h"
#include "bindings/text.h"

namespace py = pybind11;

namespace flexkv {
namespace {

// References to the Python classes. They are never released, because C++ code may still throw while the
// interpreter shuts down. This is safe, because flexkv.errors is never unloaded.
struct Classes {
  PyObject* base;
  PyObject* config;
  PyObject* geometry;
  PyObject* capacity;
  PyObject* block_range;
  PyObject* token;
  PyObject* key_scheme;
  PyObject* closed;
  PyObject* contract;
  PyObject* transfer;
  PyObject* disk;
};

Classes* classes = nullptr;

void set_error(PyObject* type, const std::string& message) {
  // A message may quote bytes in any encoding, and must not cause a UnicodeDecodeError.
  PyObject* text = decode_text(message);
  if (text == nullptr) return;
  PyErr_SetObject(type, text);
  Py_DECREF(text);
}

void translate(std::exception_ptr pending) {
  const auto set = [](PyObject* type, const std::exception& e) { set_error(type, e.what()); };
  try {
    if (pending) std::rethrow_exception(pending);
  } catch (const ConfigError& e) {
    set(classes->config, e);
  } catch (const GeometryError& e) {
    set(classes->geometry, e);
  } catch (const CapacityError& e) {
    set(classes->capacity, e);
  } catch (const BlockRangeError& e) {
    set(classes->block_range, e);
  } catch (const TokenError& e) {
    set(classes->token, e);
  } catch (const KeySchemeError& e) {
    set(classes->key_scheme, e);
  } catch (const ClosedError& e) {
    set(classes->closed, e);
  } catch (const ContractError& e) {
    set(classes->contract, e);
  } catch (const TransferError& e) {
    set(classes->transfer, e);
  } catch (const DiskError& e) {
    set(classes->disk, e);
  } catch (const Error& e) {
    set(classes->base, e);
  } catch (const py::cast_error& e) {
    set(PyExc_TypeError, e);  // pybind11 itself would raise RuntimeError for a cast_error
  } catch (const std::bad_alloc&) {
    set_error(classes->capacity, "the native core has no memory for what this call asks for");
  } catch (const std::length_error& e) {
    set_error(classes->capacity, std::string("a size that no container can have: ") + e.what());
  }
}

}  // namespace

void bind_errors(py::module_&) {
  const auto errors = py::module_::import("flexkv.errors");
  const auto get = [&](const char* name) { return py::object(errors.attr(name)).release().ptr(); };
  static Classes loaded{get("FlexKVError"),    get("ConfigError"),     get("GeometryError"),
                        get("CapacityError"),  get("BlockRangeError"), get("TokenError"),
                        get("KeySchemeError"), get("ClosedError"),     get("ContractError"),
                        get("TransferError"),  get("DiskError")};
  classes = &loaded;
  py::register_local_exception_translator(translate);
}

}  // namespace flexkv
