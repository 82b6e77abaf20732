// CUDA devices for Python: the lane that copies to one, and memory on it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/interruptible.h"
#include "bindings/native_class.h"
#include "cuda/cuda_lane.h"
#include "cuda/device_memory.h"
#include "gds/transform_device.h"

namespace py = pybind11;

namespace flexkv {
namespace {

std::shared_ptr<cuda::CudaLane> make_lane(int device, bool batch, bool kernel, bool measure,
                                          int32_t digest_threads) {
  const py::gil_scoped_release release;
  auto digests = std::make_unique<DigestCrew>(digest_threads);  // first: it refuses a number by its name
  return released_without_gil(
      std::make_shared<cuda::CudaLane>(cuda::Device::open(device), cuda::copy_kernel_launcher(),
                                       cuda::CopySwitches{batch, kernel, measure}, std::move(digests)));
}

// (path, pieces, bytes, driver calls) of each path.
py::list counts(const cuda::CudaLane& lane) {
  py::list list;
  for (int i = 0; i < cuda::kPaths; ++i) {
    const auto path = static_cast<cuda::Path>(i);
    const cuda::PathCount count = lane.copier().count(path);
    list.append(py::make_tuple(cuda::to_string(path), count.pieces, count.bytes, count.calls));
  }
  return list;
}

// Of one direction, for people: what was measured and what follows from it.
py::dict chosen(const cuda::CudaLane& lane, cuda::Direction direction) {
  const bool to_device = direction == cuda::Direction::kToDevice;
  py::dict dict;
  dict["link_bytes_per_s"] = lane.copier().link_rate(direction);
  dict["piece_bytes"] = lane.piece_bytes(to_device ? OpKind::kH2D : OpKind::kD2H);
  dict["ways"] = cuda::to_string(lane.copier().ways(direction));
  return dict;
}

}  // namespace

void bind_cuda(py::module_& m) {
  NativeBinding<cuda::CudaLane, Lane, std::shared_ptr<cuda::CudaLane>>(m, "CudaLane")
      .def(py::init(&make_lane), py::arg("device"), py::arg("batch"), py::arg("kernel"), py::arg("measure"),
           py::arg("digest_threads"))
      .def_property_readonly("notes", [](const cuda::CudaLane& lane) { return lane.copier().notes(); })
      .def_property_readonly("failed_launches",
                             [](const cuda::CudaLane& lane) { return lane.copier().failed_launches(); })
      .def_property_readonly("chosen",
                             [](const cuda::CudaLane& lane) {
                               py::dict both;
                               both["h2d"] = chosen(lane, cuda::Direction::kToDevice);
                               both["d2h"] = chosen(lane, cuda::Direction::kToHost);
                               return both;
                             })
      .def("counts", &counts);
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
  py::dict thresholds;
  thresholds["kernel_up_to_bytes"] = cuda::kKernelUpToBytes;
  thresholds["kernel_up_to_bytes_with_batch"] = cuda::kKernelUpToBytesWithBatch;
  thresholds["most_batch_copies"] = cuda::kMostBatchCopies;
  thresholds["kernel_multiprocessors"] = cuda::kKernelMultiprocessors;
  thresholds["transform_multiprocessors"] = kTransformBlocks;
  thresholds["sub_batch_bytes"] = kSubBatchBytes;
  thresholds["pieces_in_flight"] = cuda::kItemsInFlight;
  m.attr("CUDA_THRESHOLDS") = thresholds;
}

}  // namespace flexkv
