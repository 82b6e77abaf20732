// flexkv.c_ext: the native core's Python module.
#include <pybind11/pybind11.h>

#include "base/nvtx.h"
#include "bindings/bindings.h"
#include "bindings/call_guard.h"
#include "bindings/errors.h"

namespace py = pybind11;

namespace flexkv {
namespace {

constexpr const char* sanitizer() {
#if defined(__SANITIZE_ADDRESS__)
  return "address";
#elif defined(__SANITIZE_THREAD__)
  return "thread";
#else
  return "";
#endif
}

py::dict build_info() {
  py::dict info;
  info["cuda"] = FLEXKV_WITH_CUDA != 0;
  info["sanitizer"] = sanitizer();
  info["compiler"] = __VERSION__;
  info["cpp_standard"] = __cplusplus;
  return info;
}

}  // namespace
}  // namespace flexkv

PYBIND11_MODULE(c_ext, m) {
  m.doc() = "Native core of flexkv.";
  const std::string suffix = *flexkv::sanitizer() ? std::string("-") + flexkv::sanitizer() : "";
  m.attr("__variant__") = (FLEXKV_WITH_CUDA ? "cuda" : "cpu") + suffix;
  m.attr("__interface__") = FLEXKV_INTERFACE;  // the digest of c_ext.pyi, which flexkv/native_core.py checks
  m.def("build_info", &flexkv::build_info,
        "What this module was built with: cuda, sanitizer, compiler, cpp_standard.");
  m.def("load_nvtx", &flexkv::nvtx::load, py::arg("library"), py::call_guard<py::gil_scoped_release>());
  flexkv::bind_errors(m);
  flexkv::bind_gds(m);
  flexkv::bind_index(m);
  flexkv::bind_keys(m);
  flexkv::bind_layout(m);
  flexkv::bind_lookup(m);  // after bind_index: lookups take block indexes
  flexkv::bind_pool(m);
  flexkv::bind_rope(m);
  flexkv::bind_share(m);  // after bind_index and bind_pool, whose classes it uses
  flexkv::bind_transfer(m);
  flexkv::bind_cuda(m);  // after bind_transfer: CudaLane derives from Lane
  flexkv::bind_storage(m);
  flexkv::bind_gds_lane(m);  // after bind_storage: GdsLane takes page codecs
  flexkv::guard_calls(m);
}
