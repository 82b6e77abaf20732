// Binds host pools, and functions that report on memory and CUDA devices.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/path_check.h"
#include "bindings/aligned_array.h"
#include "bindings/bindings.h"
#include "bindings/interruptible.h"
#include "bindings/native_class.h"
#include "cuda/device.h"
#include "cuda/device_info.h"
#include "transfer/host_pool.h"
#include "transfer/memory_limit.h"

namespace py = pybind11;

namespace flexkv {
namespace {

std::shared_ptr<HostPool> create(int64_t slot_bytes, int64_t slots, bool shared, int64_t extent_bytes,
                                 bool huge_pages, int32_t numa_node) {
  const py::gil_scoped_release release;
  PoolOptions options;
  options.shared = shared;
  options.huge_pages = huge_pages;
  options.numa_node = numa_node;
  return released_without_gil(HostPool::create({slot_bytes, slots, extent_bytes}, options));
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
  return released_without_gil(HostPool::attach(address));
}

// Waits until `slots` slots can be used, and stops early if the pool gets no more slots. Returns whether
// `slots` slots can be used.
bool wait_ready(const HostPool& pool, int64_t slots, double deadline_s) {
  bool ready = false;
  wait_interruptibly(deadline_s, [&](double slice_s) {
    ready = pool.wait_ready(slots, slice_s);
    return ready || pool.settled() || pool.closed();
  });
  return ready || pool.ready_slots() >= slots;
}

void pin(HostPool& pool, int device) {
  const py::gil_scoped_release release;
  pool.pin(cuda::make_registrar(cuda::Device::open(device)));
}

py::tuple address(const HostPool& pool) {
  const PoolAddress a = pool.address();
  return py::make_tuple(a.pid, a.fd, py::bytes(reinterpret_cast<const char*>(a.token.data()), a.token.size()),
                        a.file_bytes);
}

py::list report(const HostPool& pool) {
  std::vector<ExtentReport> reports;
  {
    const py::gil_scoped_release release;
    reports = pool.report();
  }
  py::list extents;
  for (const ExtentReport& e : reports) {
    extents.append(py::make_tuple(e.index, e.bytes, e.pages_kind, e.huge_bytes, e.bring_up_s, e.registered,
                                  e.numa_node));
  }
  return extents;
}

// Returns a slot's memory as an array. The array keeps the pool, and so the memory, alive.
py::array_t<uint8_t> slot_array(const py::object& self, int64_t slot) {
  const auto& pool = self.cast<const HostPool&>();
  return py::array_t<uint8_t>({pool.geometry().slot_bytes}, {1}, reinterpret_cast<uint8_t*>(pool.slot(slot)),
                              self);
}

// Returns an array over the memory from the start of `slot` to the end of the slot's extent. The memory of an
// extent is contiguous.
py::array_t<uint8_t> extent_array(const py::object& self, int64_t slot) {
  const auto& pool = self.cast<const HostPool&>();
  auto* start = reinterpret_cast<uint8_t*>(pool.slot(slot));  // throws if there is no such slot
  const ExtentTable& table = pool.extents();
  const int64_t extent = table.extent_of(slot);
  const int64_t slots = extent * table.slots_per_extent + table.slots_of(extent) - slot;
  return py::array_t<uint8_t>({slots * pool.geometry().slot_bytes}, {1}, start, self);
}

void settle(const HostPool& pool, const py::array_t<int32_t, py::array::c_style>& slots, int64_t read,
            bool verified) {
  if (slots.ndim() != 1) throw ContractError("settle: slots must have one dimension");
  require_aligned<ContractError>(slots, "settle: slots");
  if (read < 1 || read >= kMostReads) {
    throw ContractError("settle: read " + std::to_string(read) + ": must be in [1, " +
                        std::to_string(kMostReads) + ")");
  }
  const std::vector<int32_t> chosen(slots.data(), slots.data() + slots.size());
  for (const int32_t slot : chosen) pool.slot(slot);  // throws if there is no such slot
  for (const int32_t slot : chosen) pool.slot_arrivals().settle(slot, read, verified);
}

}  // namespace

void bind_pool(py::module_& m) {
  NativeBinding<HostPool, std::shared_ptr<HostPool>>(m, "HostPool")
      .def(py::init(&create), py::arg("slot_bytes"), py::arg("slots"), py::arg("shared"),
           py::arg("extent_bytes"), py::arg("huge_pages"), py::arg("numa_node") = kAnyNode)
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
      .def_property_readonly("creator_gone", &HostPool::creator_gone)
      .def_property_readonly("stopped_reason", py::cpp_function(&HostPool::stopped_reason,
                                                                py::call_guard<py::gil_scoped_release>()))
      .def_property_readonly("registration_error", py::cpp_function(&HostPool::registration_error,
                                                                    py::call_guard<py::gil_scoped_release>()))
      .def("pin", &pin, py::arg("device"))
      .def_property_readonly("pinned_slots", &HostPool::pinned_slots)
      .def("wait_ready", &wait_ready, py::arg("slots"), py::arg("deadline_s"))
      .def("address", &address)
      .def_property_readonly("file_layout",
                             [](const HostPool& p) {
                               const ExtentTable& table = p.extents();
                               return py::make_tuple(p.slots_offset(), table.slots_per_extent, table.stride);
                             })
      .def("report", &report)
      .def("slot", &slot_array, py::arg("slot"))
      .def("extent_of", &extent_array, py::arg("slot"))
      .def("settle", &settle, py::arg("slots").noconvert(), py::arg("read"), py::arg("verified"))
      .def("close", &HostPool::close, py::call_guard<py::gil_scoped_release>());
  m.def(
      "available_memory",
      [](const std::string& proc_root, const std::string& cgroup_root) {
        require_no_nul<ContractError>(proc_root);
        require_no_nul<ContractError>(cgroup_root);
        MemoryLimit limit;
        {
          const py::gil_scoped_release release;
          limit = available_memory(proc_root, cgroup_root);
        }
        return py::make_tuple(limit.available_bytes, limit.source);
      },
      py::arg("proc_root") = "/proc", py::arg("cgroup_root") = "/sys/fs/cgroup");
  m.def("cuda_info", [] {
    cuda::Info info;
    {
      const py::gil_scoped_release release;
      info = cuda::device_info();
    }
    py::dict answer;
    answer["built"] = info.built;
    answer["driver"] = info.driver_version;
    answer["device_count"] = info.device_count;
    answer["reason"] = info.reason;
    return answer;
  });
}

}  // namespace flexkv
