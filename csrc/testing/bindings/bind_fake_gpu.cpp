// Binds a fake GPU: a CUDA lane that uses a fake driver instead of NVIDIA's, and the stream of a simulated
// inference engine. The fake GPU's memory is host memory, and each of its streams is a thread.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <optional>
#include <string>

#include "../../../tests/native/fake_cuda.h"
#include "base/error.h"
#include "bindings/interruptible.h"
#include "cuda/copy_ways.h"
#include "cuda/cuda_lane.h"
#include "cuda/device_info.h"
#include "testing/bindings/testing_class.h"

namespace py = pybind11;

namespace flexkv {

// A fake GPU for tests. At most one object may exist at a time, because the process has a single fake driver.
class FakeGpu {
 public:
  FakeGpu(std::optional<int64_t> load_kernel_below, std::optional<int64_t> store_kernel_below) {
    fake_cuda::reset();
    // This call discards a violation that an earlier test caused after its own check of violations: Python
    // may have freed that test's lane only after the test had ended.
    fake_cuda::take_violation("of an earlier test");
    const cuda::LoadedDriver loaded = cuda::find_functions(fake_cuda::finder());
    if (!loaded.missing.empty()) throw ContractError("the fake driver lacks " + loaded.missing);
    lane_ = std::make_shared<cuda::CudaLane>(
        cuda::Device::open(0, loaded.driver), fake_cuda::copy_kernels(),
        cuda::CopySwitches{true, true, {load_kernel_below, store_kernel_below}});
    stream_ = fake_cuda::make_stream(false);
  }
  ~FakeGpu() { fake_cuda::destroy_stream(stream_); }
  FakeGpu(const FakeGpu&) = delete;
  FakeGpu& operator=(const FakeGpu&) = delete;

  const std::shared_ptr<cuda::CudaLane>& lane() const { return lane_; }
  uintptr_t stream() const { return stream_; }
  cuda::Identity identity() const {
    return cuda::identify(0, cuda::find_functions(fake_cuda::finder()).driver);
  }
  // Stops every stream except the inference engine's if `held` is true; otherwise lets them continue.
  void hold_copies(bool held) {
    fake_cuda::hold_all(held);
    fake_cuda::release_stream(stream_);
  }
  void drain() { fake_cuda::drain(stream_); }

  // Enqueues a call of `work` on the inference engine's stream. Precondition: the caller holds the GIL.
  void enqueue(py::function work) {
    // The lambda captures a pointer to the py::function; the stream's thread deletes the py::function while
    // it holds the GIL. If the lambda captured the py::function by value, a copy of the std::function would
    // copy it, possibly without the GIL.
    auto* held = new py::function(std::move(work));
    const py::gil_scoped_release release;
    fake_cuda::enqueue(stream_, [held] {
      const py::gil_scoped_acquire acquire;
      try {
        (*held)();
      } catch (py::error_already_set& error) {
        error.discard_as_unraisable("work on the fake GPU's stream");
      }
      delete held;
    });
  }

 private:
  std::shared_ptr<cuda::CudaLane> lane_;
  uintptr_t stream_ = 0;
};

template <>
inline constexpr bool kIsNativeClass<FakeGpu> = true;

void bind_fake_gpu(py::module_& m) {
  NativeBinding<FakeGpu, std::shared_ptr<FakeGpu>>(m, "FakeGpu")
      .def(py::init([](std::optional<int64_t> load_kernel_below, std::optional<int64_t> store_kernel_below) {
             const py::gil_scoped_release release;
             return released_without_gil(std::make_shared<FakeGpu>(load_kernel_below, store_kernel_below));
           }),
           py::arg("load_kernel_below") = py::none(), py::arg("store_kernel_below") = py::none())
      .def_property_readonly(
          "lane",
          [](const FakeGpu& gpu) { return released_without_gil(std::static_pointer_cast<Lane>(gpu.lane())); })
      .def_property_readonly("stream", &FakeGpu::stream)
      .def("enqueue", &FakeGpu::enqueue, py::arg("work"))
      .def("hold_copies", &FakeGpu::hold_copies, py::arg("held"), py::call_guard<py::gil_scoped_release>())
      .def("drain", &FakeGpu::drain, py::call_guard<py::gil_scoped_release>())
      .def("ways",
           [](const FakeGpu& gpu) {
             const cuda::Capabilities usable = gpu.lane()->copier().capabilities();
             return std::map<std::string, std::string>{
                 {"h2d", cuda::describe_ways(usable, cuda::Direction::kToDevice)},
                 {"d2h", cuda::describe_ways(usable, cuda::Direction::kToHost)}};
           })
      .def("identity",
           [](const FakeGpu& gpu) {
             const cuda::Identity found = gpu.identity();
             return py::make_tuple(found.uuid, found.pci);
           })
      .def("violations", [](const FakeGpu&) { return fake_cuda::violations(); });
}

}  // namespace flexkv
