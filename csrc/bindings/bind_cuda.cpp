// Binds the lane that copies pages to and from a CUDA device, and the class for memory on the device.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "bindings/bindings.h"
#include "bindings/interruptible.h"
#include "bindings/native_class.h"
#include "cuda/copy_ways.h"
#include "cuda/cuda_lane.h"
#include "cuda/device_info.h"
#include "cuda/device_memory.h"
#include "gds/transform/device.h"

namespace py = pybind11;

namespace flexkv {
namespace {

std::shared_ptr<cuda::CudaLane> make_cuda_lane(int device, bool batch, bool kernel, int32_t digest_threads,
                                               std::optional<int64_t> load_kernel_below,
                                               std::optional<int64_t> store_kernel_below) {
  const py::gil_scoped_release release;
  for (const auto& below : {load_kernel_below, store_kernel_below}) {
    if (below.value_or(0) >= 0) continue;
    throw ConfigError("the kernel copies runs below " + std::to_string(*below) +
                      " bytes: must not be negative");
  }
  // The crew is made first, because its error message names the bad argument.
  auto digests = std::make_unique<DigestCrew>(digest_threads);
  return released_without_gil(std::make_shared<cuda::CudaLane>(
      cuda::Device::open(device), cuda::copy_kernels(),
      cuda::CopySwitches{batch, kernel, {load_kernel_below, store_kernel_below}}, std::move(digests)));
}

// Returns (path, pieces, bytes, driver calls) for each path, that is, for each method by which the lane
// copies.
py::list path_counts(const cuda::CudaLane& lane) {
  py::list list;
  for (int i = 0; i < cuda::kPaths; ++i) {
    const auto path = static_cast<cuda::Path>(i);
    const cuda::PathCount count = lane.copier().count(path);
    list.append(py::make_tuple(cuda::to_string(path), count.pieces, count.bytes, count.calls));
  }
  return list;
}

}  // namespace

void bind_cuda(py::module_& m) {
  NativeBinding<cuda::CudaLane, Lane, std::shared_ptr<cuda::CudaLane>>(m, "CudaLane")
      .def(py::init(&make_cuda_lane), py::arg("device"), py::arg("batch"), py::arg("kernel"),
           py::arg("digest_threads"), py::arg("load_kernel_below") = py::none(),
           py::arg("store_kernel_below") = py::none())
      .def_property_readonly("notes", [](const cuda::CudaLane& lane) { return lane.copier().notes(); })
      .def_property_readonly("failed_launches",
                             [](const cuda::CudaLane& lane) { return lane.copier().failed_launches(); })
      .def_property_readonly("ways",
                             [](const cuda::CudaLane& lane) {
                               const cuda::Capabilities usable = lane.copier().capabilities();
                               py::dict both;
                               both["h2d"] = cuda::describe_ways(usable, cuda::Direction::kToDevice);
                               both["d2h"] = cuda::describe_ways(usable, cuda::Direction::kToHost);
                               return both;
                             })
      .def("counts", &path_counts);
  NativeBinding<cuda::DeviceMemory, std::shared_ptr<cuda::DeviceMemory>>(m, "DeviceMemory")
      .def(py::init([](int device, size_t bytes) {
             const py::gil_scoped_release release;
             return std::make_shared<cuda::DeviceMemory>(cuda::Device::open(device), bytes);
           }),
           py::arg("device"), py::arg("bytes"))
      .def_property_readonly("address", &cuda::DeviceMemory::address)
      .def_property_readonly("multiprocessors", &cuda::DeviceMemory::multiprocessors)
      .def("time_copies", &cuda::DeviceMemory::time_copies, py::arg("to_device"), py::arg("call_bytes"),
           py::arg("calls"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "cuda_identity",
      [](int device) {
        const auto found = without_gil([&] { return cuda::identify(device); });
        return py::make_tuple(found.uuid, found.pci);
      },
      py::arg("device"));
  py::dict thresholds;
  thresholds["load_kernel_below_bytes"] = cuda::kLoadKernelBelowBytes;
  thresholds["load_multiprocessors"] = cuda::kKernelMultiprocessors[0];
  thresholds["store_multiprocessors"] = cuda::kKernelMultiprocessors[1];
  thresholds["load_portion_bytes"] = cuda::kPortionBytes[0];
  thresholds["store_portion_bytes"] = cuda::kPortionBytes[1];
  thresholds["portion_copies"] = cuda::kPortionCopies;
  thresholds["transform_multiprocessors"] = kTransformBlocks;
  thresholds["sub_batch_bytes"] = kSubBatchBytes;
  thresholds["load_portions_in_flight"] = cuda::kPortionsInFlight[0];
  thresholds["store_portions_in_flight"] = cuda::kPortionsInFlight[1];
  m.attr("CUDA_THRESHOLDS") = thresholds;
}

}  // namespace flexkv
