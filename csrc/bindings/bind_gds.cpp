// Binds the direct transfers (GPUDirect Storage) between files and the inference engine's pool.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/bindings.h"
#include "bindings/count_dicts.h"
#include "bindings/interruptible.h"
#include "bindings/io_backend_name.h"
#include "bindings/list_argument.h"
#include "bindings/native_class.h"
#include "bindings/register_pool_name.h"
#include "bindings/tensor_argument.h"
#include "bindings/text.h"
#include "gds/gds_manager.h"
#include "gds/io_choice.h"
#include "gds/raw/raw_transfer.h"
#include "gds/transform/timing.h"

namespace py = pybind11;

namespace flexkv {
namespace {

// Converts the argument `ssd_files`. The loop iterates over a copy of the mapping's items, because converting
// an item may run Python code that changes the mapping.
std::map<int32_t, List<std::string>> files_of(const py::object& mapping) {
  if (PyMapping_Check(mapping.ptr()) == 0 || !py::hasattr(mapping, "items")) {
    throw py::type_error("ssd_files must map device numbers to lists of paths");
  }
  const auto items = py::reinterpret_steal<py::object>(PyMapping_Items(mapping.ptr()));
  if (!items) throw py::error_already_set();
  py::detail::make_caster<List<std::pair<int32_t, List<std::string>>>> caster;
  if (!caster.load(items, true)) {
    throw py::type_error("ssd_files must map device numbers of 32 bits to lists of paths");
  }
  std::map<int32_t, List<std::string>> files;
  for (auto& [device, names] : py::detail::cast_op<List<std::pair<int32_t, List<std::string>>>&>(caster)) {
    files[device] = std::move(names);
  }
  return files;
}

std::vector<std::vector<std::string>> by_device(const py::object& ssd_files, int32_t num_devices) {
  std::vector<std::vector<std::string>> paths;
  for (auto& [device, names] : files_of(ssd_files)) {
    if (device != static_cast<int32_t>(paths.size())) {
      throw ConfigError("ssd_files names device " + std::to_string(device) +
                        ": devices are numbered 0, 1, ...");
    }
    paths.push_back(names);
  }
  if (static_cast<int32_t>(paths.size()) != num_devices) {
    throw ConfigError("num_devices is " + std::to_string(num_devices) + ", but ssd_files has " +
                      std::to_string(paths.size()) + " devices");
  }
  return paths;
}

std::unique_ptr<GDSManager> make_manager(const py::object& ssd_files, int32_t num_devices,
                                         int64_t round_robin, int32_t threads_per_device,
                                         bool use_staged_transfer, int32_t max_staging_blocks,
                                         int64_t max_staging_bytes, std::optional<int32_t> gpu_device_id,
                                         uintptr_t engine_stream, double deadline_s, double stuck_s,
                                         const std::string& io, const std::string& register_pool) {
  const auto paths = by_device(ssd_files, num_devices);
  const GdsOptions options{.round_robin = round_robin,
                           .threads_per_device = threads_per_device,
                           .use_staged_transfer = use_staged_transfer,
                           .max_staging_blocks = max_staging_blocks,
                           .max_staging_bytes = max_staging_bytes,
                           .deadline_s = deadline_s,
                           .stuck_s = stuck_s,
                           .register_pool = to_register_pool(register_pool),
                           .io = to_io_backend(io)};
  const py::gil_scoped_release release;
  return std::make_unique<GDSManager>(paths, options, choose_device(gpu_device_id, engine_stream));
}

BackendType to_backend(int32_t gpu_block_type) {
  if (gpu_block_type >= 0 && gpu_block_type <= 2) return static_cast<BackendType>(gpu_block_type);
  throw GeometryError("gpu_block_type is " + std::to_string(gpu_block_type) +
                      ": allowed are 0 (vLLM), 1 (TensorRT-LLM) and 2 (SGLang)");
}

GTensorHandler to_handler(const TensorArgument& pointers, int32_t gpu_block_type, int64_t total_layers,
                          int32_t kv_dim, int64_t kv_stride, int64_t block_stride, int64_t layer_stride) {
  const auto addresses = pointers.int64s();
  const BackendType type = to_backend(gpu_block_type);
  const auto count = static_cast<int64_t>(addresses.size());
  const int64_t layers = type == BackendType::TRTLLM   ? total_layers
                         : type == BackendType::SGLANG ? count / kv_dim
                                                       : count;
  const GTensorHandler handler(type, reinterpret_cast<int64_t**>(const_cast<int64_t*>(addresses.data())),
                               layers, kv_stride, block_stride, layer_stride);
  if (count != handler.num_tensors(kv_dim)) {
    throw GeometryError(pointers.name() + " has " + std::to_string(count) + " addresses: gpu_block_type " +
                        std::to_string(gpu_block_type) + " needs " +
                        std::to_string(handler.num_tensors(kv_dim)));
  }
  return handler;
}

enum class RawCall { kDirect, kStaged, kReserve };

// The common body of the functions that transfer to and from raw files. `staging_buffer` is None unless the
// staged function passes a buffer.
void run_transfer(GDSManager& manager, const py::object& gpu_layer_id_list, const py::object& gpu_layer_ptrs,
                  const py::object& gds_block_ids, const py::object& gpu_block_ids, int64_t gpu_kv_stride,
                  int64_t gpu_block_stride, int64_t gpu_layer_stride, int64_t gds_layer_stride,
                  int64_t gds_block_stride, int64_t gds_kv_stride, int64_t block_size, int64_t copy_offset,
                  int64_t num_blocks_per_file, int64_t total_layers, bool is_read, bool verbose, bool is_mla,
                  int32_t gpu_block_type, const py::object& staging_buffer, RawCall call) {
  const TensorArgument layers(gpu_layer_id_list, "gpu_layer_id_list");
  const TensorArgument pointers(gpu_layer_ptrs, "gpu_layer_ptrs_tensor");
  const TensorArgument file_blocks(gds_block_ids, "gds_block_ids");
  const TensorArgument pool_blocks(gpu_block_ids, "gpu_block_ids");
  std::optional<TensorArgument> staging;
  if (!staging_buffer.is_none()) staging.emplace(staging_buffer, "staging_buffer");
  if (staging && staging->on_host() != (manager.device().number() == kHostDevice)) {
    throw GeometryError(std::string("staging_buffer is in ") + (staging->on_host() ? "host" : "device") +
                        " memory: the manager's pool is on " + manager.device().name());
  }
  const int32_t kv_dim = is_mla ? 1 : 2;
  RawTransfer transfer;
  transfer.pool = to_handler(pointers, gpu_block_type, total_layers, kv_dim, gpu_kv_stride, gpu_block_stride,
                             gpu_layer_stride);
  transfer.file = {.layer_stride = gds_layer_stride,
                   .kv_stride = gds_kv_stride,
                   .block_stride = gds_block_stride,
                   .copy_offset = copy_offset,
                   .chunk_bytes = block_size,
                   .kv_dim = kv_dim,
                   .total_layers = total_layers};
  transfer.layers = layers.int32s();
  transfer.file_blocks = file_blocks.int64s();
  transfer.pool_blocks = pool_blocks.int64s();
  transfer.blocks_per_file = num_blocks_per_file;
  transfer.is_read = is_read;
  transfer.staged = call != RawCall::kDirect;
  transfer.verbose = verbose;
  if (staging) {
    transfer.staging = staging->data();
    transfer.staging_bytes = staging->bytes();
  }
  const py::gil_scoped_release release;
  if (call == RawCall::kReserve) {
    reserve_raw_staging(manager, transfer);
  } else {
    transfer_raw(manager, transfer);
  }
}

// Returns one pair per repeat: the seconds that the transform took, and the seconds that a plain copy took.
std::vector<std::pair<double, double>> timed_transform(int32_t gpu_device_id, int32_t layers,
                                                       int64_t run_bytes, int64_t blocks, bool into_pool,
                                                       bool whole_device, int32_t repeats) {
  const py::gil_scoped_release release;
  const auto grid = whole_device ? TransformGrid::kWholeDevice : TransformGrid::kBesideModel;
  const auto device = choose_device(gpu_device_id, 0, grid);
  std::vector<std::pair<double, double>> times;
  for (const TransformTime& t : time_transform(*device, {layers, run_bytes, blocks, into_pool}, repeats)) {
    times.emplace_back(t.transform_s, t.copy_s);
  }
  return times;
}

// Binds a function that transfers to or from raw files. Its arguments are those that all functions for raw
// files have, followed by `more`.
template <typename Function, typename... More>
void def_raw_transfer(py::module_& m, const char* name, Function&& function, More&&... more) {
  m.def(name, std::forward<Function>(function), py::arg("gds_manager"), py::arg("gpu_layer_id_list"),
        py::arg("gpu_layer_ptrs_tensor"), py::arg("gds_block_ids"), py::arg("gpu_block_ids"),
        py::arg("gpu_kv_stride_in_bytes"), py::arg("gpu_block_stride_in_bytes"),
        py::arg("gpu_layer_stride_in_bytes"), py::arg("gds_layer_stride_in_bytes"),
        py::arg("gds_block_stride_in_bytes"), py::arg("gds_kv_stride_in_bytes"),
        py::arg("block_size_in_bytes"), py::arg("gds_copy_off_inside_chunks"), py::arg("num_blocks_per_file"),
        py::arg("total_layers"), py::arg("is_read"), py::arg("verbose") = false, py::arg("is_mla") = false,
        py::arg("gpu_block_type") = 0, std::forward<More>(more)...);
}

}  // namespace

void bind_gds(py::module_& m) {
  const GdsOptions defaults;
  m.def("time_transform", &timed_transform, py::arg("gpu_device_id"), py::arg("layers"), py::arg("run_bytes"),
        py::arg("blocks"), py::arg("into_pool"), py::arg("whole_device"), py::arg("repeats"));
  NativeBinding<GDSManager>(m, "GDSManager")
      .def(py::init(&make_manager), py::arg("ssd_files"), py::arg("num_devices"), py::arg("round_robin") = 1,
           py::kw_only(), py::arg("threads_per_device") = defaults.threads_per_device,
           py::arg("use_staged_transfer") = defaults.use_staged_transfer,
           py::arg("max_staging_blocks") = defaults.max_staging_blocks,
           py::arg("max_staging_bytes") = defaults.max_staging_bytes, py::arg("gpu_device_id") = py::none(),
           py::arg("engine_stream") = 0, py::arg("deadline_s") = defaults.deadline_s,
           py::arg("stuck_s") = defaults.stuck_s, py::arg("io") = "auto", py::arg("register_pool") = "auto")
      .def_property_readonly("num_devices", [](const GDSManager& g) { return g.devices(); })
      .def_property_readonly("round_robin", [](const GDSManager& g) { return g.options().round_robin; })
      .def_property_readonly("files",
                             [](const GDSManager& g) {
                               std::map<int32_t, std::vector<py::str>> answer;
                               for (int32_t i = 0; i < g.devices(); ++i) {
                                 for (const std::string& path : g.paths()[static_cast<size_t>(i)])
                                   answer[i].push_back(to_path(path));
                               }
                               return answer;
                             })
      .def_property_readonly("threads",
                             [](const GDSManager& g) { return without_gil([&] { return g.threads(); }); })
      .def_property_readonly(
          "staging_bytes", [](const GDSManager& g) { return without_gil([&] { return g.staging_bytes(); }); })
      .def_property_readonly(
          "staging_slots",
          [](const GDSManager& g) { return without_gil([&] { return g.staging_slots().slots; }); })
      .def_property_readonly(
          "staging_slot_bytes",
          [](const GDSManager& g) { return without_gil([&] { return g.staging_slots().slot_bytes; }); })
      .def_property_readonly(
          "down_reason",
          [](const GDSManager& g) { return to_text(without_gil([&] { return g.down_reason(); })); })
      .def_property_readonly(
          "totals", [](const GDSManager& g) { return to_dict(without_gil([&] { return g.totals(); })); })
      .def("describe", [](const GDSManager& g) { return to_text(without_gil([&] { return g.describe(); })); })
      .def_property_readonly(
          "pool", [](const GDSManager& g) { return to_dict(without_gil([&] { return g.pool(); })); })
      .def(
          "register_pool",
          [](GDSManager& g, uintptr_t address, int64_t blocks, int64_t block_stride, int64_t block_bytes) {
            g.register_pool({address, blocks, block_stride, block_bytes});
          },
          py::arg("address"), py::arg("blocks"), py::arg("block_stride"), py::arg("block_bytes"),
          py::call_guard<py::gil_scoped_release>())
      .def("release_pool", &GDSManager::release_pool, py::call_guard<py::gil_scoped_release>())
      .def("restore_pool", &GDSManager::restore_pool, py::call_guard<py::gil_scoped_release>())
      .def("cancel", &GDSManager::cancel, py::call_guard<py::gil_scoped_release>())
      .def("close", &GDSManager::close, py::call_guard<py::gil_scoped_release>());
  def_raw_transfer(
      m, "transfer_kv_blocks_gds_staged",
      [](GDSManager& manager, const py::object& layer_ids, const py::object& layer_ptrs,
         const py::object& gds_ids, const py::object& gpu_ids, int64_t gpu_kv, int64_t gpu_block,
         int64_t gpu_layer, int64_t gds_layer, int64_t gds_block, int64_t gds_kv, int64_t block_size,
         int64_t copy_offset, int64_t per_file, int64_t total_layers, bool is_read, bool verbose, bool is_mla,
         int32_t gpu_block_type, const py::object& staging_buffer) {
        run_transfer(manager, layer_ids, layer_ptrs, gds_ids, gpu_ids, gpu_kv, gpu_block, gpu_layer,
                     gds_layer, gds_block, gds_kv, block_size, copy_offset, per_file, total_layers, is_read,
                     verbose, is_mla, gpu_block_type, staging_buffer, RawCall::kStaged);
      },
      py::arg("staging_buffer") = py::none());
  def_raw_transfer(m, "transfer_kv_blocks_gds",
                   [](GDSManager& manager, const py::object& layer_ids, const py::object& layer_ptrs,
                      const py::object& gds_ids, const py::object& gpu_ids, int64_t gpu_kv, int64_t gpu_block,
                      int64_t gpu_layer, int64_t gds_layer, int64_t gds_block, int64_t gds_kv,
                      int64_t block_size, int64_t copy_offset, int64_t per_file, int64_t total_layers,
                      bool is_read, bool verbose, bool is_mla, int32_t gpu_block_type) {
                     run_transfer(manager, layer_ids, layer_ptrs, gds_ids, gpu_ids, gpu_kv, gpu_block,
                                  gpu_layer, gds_layer, gds_block, gds_kv, block_size, copy_offset, per_file,
                                  total_layers, is_read, verbose, is_mla, gpu_block_type, py::none(),
                                  RawCall::kDirect);
                   });
  def_raw_transfer(m, "reserve_gds_staging",
                   [](GDSManager& manager, const py::object& layer_ids, const py::object& layer_ptrs,
                      const py::object& gds_ids, const py::object& gpu_ids, int64_t gpu_kv, int64_t gpu_block,
                      int64_t gpu_layer, int64_t gds_layer, int64_t gds_block, int64_t gds_kv,
                      int64_t block_size, int64_t copy_offset, int64_t per_file, int64_t total_layers,
                      bool is_read, bool verbose, bool is_mla, int32_t gpu_block_type) {
                     run_transfer(manager, layer_ids, layer_ptrs, gds_ids, gpu_ids, gpu_kv, gpu_block,
                                  gpu_layer, gds_layer, gds_block, gds_kv, block_size, copy_offset, per_file,
                                  total_layers, is_read, verbose, is_mla, gpu_block_type, py::none(),
                                  RawCall::kReserve);
                   });
}

}  // namespace flexkv
