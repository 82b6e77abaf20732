// Host pools and what is known of memory and CUDA devices, for Python.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <string>

#include "base/error.h"
#include "bindings/bindings.h"
#include "transfer/cuda_device.h"
#include "transfer/host_pool.h"
#include "transfer/memory_limit.h"

namespace py = pybind11;

namespace flexkv {
namespace {

std::shared_ptr<HostPool> create(int64_t slot_bytes, int64_t slots, bool shared, int64_t extent_bytes,
                                 bool huge_pages) {
  const py::gil_scoped_release release;
  return HostPool::create({slot_bytes, slots, extent_bytes}, shared, huge_pages);
}

std::shared_ptr<HostPool> attach(int pid, int fd, const std::string& token, int64_t file_bytes,
                                 int64_t slot_bytes, int64_t slots, int64_t extent_bytes) {
  PoolAddress address{pid, fd, {}, file_bytes, {slot_bytes, slots, extent_bytes}};
  if (token.size() != address.token.size()) {
    throw ContractError("a pool token has " + std::to_string(address.token.size()) + " bytes, given " +
                        std::to_string(token.size()));
  }
  std::copy(token.begin(), token.end(), address.token.begin());
  const py::gil_scoped_release release;
  return HostPool::attach(address);
}

py::tuple address(const HostPool& pool) {
  const PoolAddress a = pool.address();
  return py::make_tuple(a.pid, a.fd, py::bytes(reinterpret_cast<const char*>(a.token.data()), a.token.size()),
                        a.file_bytes);
}

py::list report(const HostPool& pool) {
  py::list extents;
  for (const ExtentReport& e : pool.report()) {
    extents.append(py::make_tuple(e.index, e.bytes, e.pages_kind, e.huge_bytes, e.bring_up_s, e.registered));
  }
  return extents;
}

// The array holds the pool, and with it the memory.
py::array_t<uint8_t> slot_array(const py::object& self, int64_t slot) {
  const auto& pool = self.cast<const HostPool&>();
  return py::array_t<uint8_t>({pool.geometry().slot_bytes}, {1}, reinterpret_cast<uint8_t*>(pool.slot(slot)),
                              self);
}

}  // namespace

void bind_pool(py::module_& m) {
  py::class_<HostPool, std::shared_ptr<HostPool>>(m, "HostPool")
      .def(py::init(&create), py::arg("slot_bytes"), py::arg("slots"), py::arg("shared"),
           py::arg("extent_bytes"), py::arg("huge_pages"))
      .def_static("attach", &attach, py::arg("pid"), py::arg("fd"), py::arg("token"), py::arg("file_bytes"),
                  py::arg("slot_bytes"), py::arg("slots"), py::arg("extent_bytes"))
      .def_property_readonly("slot_bytes", [](const HostPool& p) { return p.geometry().slot_bytes; })
      .def_property_readonly("slots", [](const HostPool& p) { return p.geometry().slots; })
      .def_property_readonly("extent_bytes", [](const HostPool& p) { return p.geometry().extent_bytes; })
      .def_property_readonly("shared", &HostPool::shared)
      .def_property_readonly("attached", &HostPool::attached)
      .def_property_readonly("closed", &HostPool::closed)
      .def_property_readonly("settled", &HostPool::settled)
      .def_property_readonly("ready_slots", &HostPool::ready_slots)
      .def_property_readonly("stopped_reason", &HostPool::stopped_reason)
      .def_property_readonly("registration_error", &HostPool::registration_error)
      .def("wait_ready", &HostPool::wait_ready, py::arg("slots"), py::arg("deadline_s"),
           py::call_guard<py::gil_scoped_release>())
      .def("address", &address)
      .def("report", &report)
      .def("slot", &slot_array, py::arg("slot"))
      .def("close", &HostPool::close, py::call_guard<py::gil_scoped_release>());
  m.def(
      "available_memory",
      [](const std::string& proc_root, const std::string& cgroup_root) {
        const MemoryLimit limit = available_memory(proc_root, cgroup_root);
        return py::make_tuple(limit.available_bytes, limit.source);
      },
      py::arg("proc_root") = "/proc", py::arg("cgroup_root") = "/sys/fs/cgroup");
  m.def("cuda_info", [] {
    const CudaInfo info = cuda_info();
    py::dict answer;
    answer["built"] = info.built;
    answer["driver"] = info.driver_version;
    answer["device_count"] = info.device_count;
    answer["reason"] = info.reason;
    return answer;
  });
}

}  // namespace flexkv
