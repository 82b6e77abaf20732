// Reads graphs that Python code submits. The fields of ops and edges are read by their names (see
// flexkv/transfer/graph.py).
#include "bindings/graph_reader.h"

#include <pybind11/numpy.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/list_argument.h"

namespace py = pybind11;

namespace flexkv {
namespace {

using IdArray = py::array_t<int32_t, py::array::c_style>;

template <typename T>
std::vector<T> copy_of(const py::array_t<T, py::array::c_style>& array) {
  std::vector<T> copy(static_cast<size_t>(array.size()));
  // memcpy is used because the array may be unaligned.
  if (!copy.empty()) std::memcpy(copy.data(), array.data(), copy.size() * sizeof(T));
  return copy;
}

std::vector<int32_t> to_ids(const py::handle& object, const char* what, int64_t op_id) {
  if (!py::isinstance<IdArray>(object) || py::reinterpret_borrow<py::array>(object).ndim() != 1) {
    const std::string given = py::isinstance<py::array>(object)
                                  ? "an array of " + py::str(object.attr("dtype")).cast<std::string>() +
                                        ", shape " + py::str(object.attr("shape")).cast<std::string>()
                                  : "a " + py::str(py::type::of(object).attr("__name__")).cast<std::string>();
    throw ContractError(std::string(what) + " of op " + std::to_string(op_id) +
                        " must be an int32 C-contiguous array of shape [pages]; given " + given);
  }
  return copy_of(py::reinterpret_borrow<IdArray>(object));
}

// Returns an op's array. Throws ContractError unless the array is contiguous and has elements of type T and
// `dimensions` dimensions. (pybind11's casters would convert or copy any other array.)
template <typename T>
py::array_t<T, py::array::c_style> op_array(const py::handle& object, int64_t op_id, const char* name,
                                            int dimensions, const std::string& needed) {
  using Array = py::array_t<T, py::array::c_style>;
  if (!py::isinstance<Array>(object) || py::reinterpret_borrow<py::array>(object).ndim() != dimensions) {
    throw ContractError(std::string(name) + " of op " + std::to_string(op_id) + " must be " + needed);
  }
  return py::reinterpret_borrow<Array>(object);
}

std::vector<uint8_t> to_tags(const py::handle& object, int64_t op_id) {
  const std::string needed = "a uint8 C-contiguous array of shape [pages, " + std::to_string(kTagBytes) + "]";
  const auto tags = op_array<uint8_t>(object, op_id, "tags", 2, needed);
  if (tags.shape(1) != static_cast<py::ssize_t>(kTagBytes)) {
    throw ContractError("tags of op " + std::to_string(op_id) + " must be " + needed);
  }
  return copy_of(tags);
}

std::vector<uint64_t> to_digests(const py::handle& object, int64_t op_id) {
  return copy_of(
      op_array<uint64_t>(object, op_id, "digests", 2, "a uint64 C-contiguous array of shape [pages, runs]"));
}

std::vector<int64_t> to_reads(const py::handle& object, int64_t op_id) {
  return copy_of(
      op_array<int64_t>(object, op_id, "reads", 1, "an int64 C-contiguous array of shape [pages]"));
}

// Returns the field `name` of an op or edge. Throws ContractError if there is no such field. `what` is "op"
// or "edge".
py::object field(const py::object& of, const char* what, const char* name) {
  PyObject* value = PyObject_GetAttrString(of.ptr(), name);
  if (value != nullptr) return py::reinterpret_steal<py::object>(value);
  if (PyErr_ExceptionMatches(PyExc_AttributeError) == 0) throw py::error_already_set();
  PyErr_Clear();
  throw ContractError(std::string("an ") + what + " of a graph has no field '" + name + "': given a " +
                      Py_TYPE(of.ptr())->tp_name);
}

template <typename T>
T number(const py::object& of, const char* what, const char* name) try {
  return field(of, what, name).cast<T>();
} catch (const py::cast_error&) {
  throw ContractError(std::string(name) + " of an " + what + " of a graph must be an integer of " +
                      std::to_string(8 * sizeof(T)) + " bits");
}

OpSpec read_op(const py::object& op) {
  const auto value = [&op](const char* name) { return field(op, "op", name); };
  OpSpec spec;
  spec.op_id = number<int64_t>(op, "op", "op_id");
  spec.kind = static_cast<OpKind>(number<int32_t>(op, "op", "kind"));
  spec.group = number<int32_t>(op, "op", "group");
  spec.priority = static_cast<Priority>(number<int32_t>(op, "op", "priority"));
  spec.blocks = to_ids(value("blocks"), "blocks", spec.op_id);
  spec.slots = to_ids(value("slots"), "slots", spec.op_id);
  const py::object layerwise = value("layerwise");
  if (!py::isinstance<py::bool_>(layerwise)) {
    throw ContractError("layerwise of op " + std::to_string(spec.op_id) + " must be True or False, given a " +
                        Py_TYPE(layerwise.ptr())->tp_name);
  }
  spec.layerwise = layerwise.cast<bool>();
  spec.places = to_ids(value("places"), "places", spec.op_id);
  spec.tags = to_tags(value("tags"), spec.op_id);
  spec.digests = to_digests(value("digests"), spec.op_id);
  spec.reads = to_reads(value("reads"), spec.op_id);
  return spec;
}

EdgeSpec read_edge(const py::object& edge) {
  return {number<int32_t>(edge, "edge", "before"), number<int32_t>(edge, "edge", "after"),
          static_cast<EdgeKind>(number<int32_t>(edge, "edge", "kind"))};
}

}  // namespace

GraphSpec read_graph(const py::sequence& ops, const py::sequence& edges) {
  GraphSpec graph;
  visit_items(ops, [&](const py::object& op) {
    graph.ops.push_back(read_op(op));
    return true;
  });
  visit_items(edges, [&](const py::object& edge) {
    graph.edges.push_back(read_edge(edge));
    return true;
  });
  return graph;
}

}  // namespace flexkv
