// Binds the lane that moves pages directly between the inference engine's pool and the slabs on disk.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
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
#include "bindings/text.h"
#include "gds/cufile_library.h"
#include "gds/gds_lane.h"
#include "gds/io_choice.h"

namespace py = pybind11;

namespace flexkv {
namespace {

// A slab as Python passes it: path, header bytes, slot bytes, slots, id.
using SlabRow = std::tuple<std::string, int64_t, int64_t, int64_t, uint64_t>;

std::shared_ptr<GdsLane> make_gds_lane(const List<std::shared_ptr<PageCodec>>& codecs, int32_t stripe,
                                       const List<List<SlabRow>>& slabs, int32_t threads_per_device,
                                       bool use_staged_transfer, int32_t max_staging_blocks,
                                       int64_t max_staging_bytes, int32_t gpu_device_id,
                                       const std::string& io, const std::string& register_pool) {
  std::vector<GdsGroup> groups;
  for (const auto& codec : codecs) groups.push_back({codec, std::vector<GdsSlab>(slabs.size())});
  std::vector<std::vector<std::string>> paths;
  for (size_t disk = 0; disk < slabs.size(); ++disk) {
    if (slabs[disk].empty()) continue;
    if (slabs[disk].size() != codecs.size()) throw ContractError("a gds lane needs a slab for each group");
    std::vector<std::string>& names = paths.emplace_back();
    for (size_t g = 0; g < groups.size(); ++g) {
      const auto& [path, header_bytes, slot_bytes, slots, id] = slabs[disk][g];
      const auto at = std::find(names.begin(), names.end(), path) - names.begin();
      if (at == static_cast<ptrdiff_t>(names.size())) names.push_back(path);  // groups may share a path
      groups[g].slabs[disk] = {static_cast<int32_t>(paths.size()) - 1,
                               {header_bytes, slot_bytes, slots, id},
                               static_cast<int32_t>(at)};
    }
  }
  // The GDS manager needs no deadlines: the transfer engine's watchdog finds transfers that hang. The
  // watchdog also keeps the blocks and disk slots of these transfers from being reused before they end.
  const GdsOptions options{.threads_per_device = threads_per_device,
                           .use_staged_transfer = use_staged_transfer,
                           .max_staging_blocks = max_staging_blocks,
                           .max_staging_bytes = max_staging_bytes,
                           .most_transfer_bytes = most_gds_transfer_bytes(),
                           .deadline_s = kLongestWaitS,
                           .stuck_s = kLongestWaitS,
                           .register_pool = to_register_pool(register_pool)};
  const IoBackend backend = to_io_backend(io);
  const py::gil_scoped_release release;
  const auto device = choose_device(gpu_device_id, 0);
  auto files = std::make_shared<const RawFiles>(paths, OpenFiles::kExisting);
  auto file_io = choose_io(files, device, backend);
  auto manager = std::make_shared<GDSManager>(std::move(files), options, device, std::move(file_io));
  return released_without_gil(std::make_shared<GdsLane>(std::move(groups), stripe, std::move(manager)));
}

// Returns libcufile's path, how it was found, its version, and an empty string. If libcufile was not found,
// returns three empty strings and the reason.
py::tuple find_cufile() {
  std::string why;
  std::optional<CufileLibrary> library;
  {
    const py::gil_scoped_release release;
    library = load_cufile(&why);
  }
  if (!library) return py::make_tuple("", "", "", to_text(why));
  const std::string version = library->version > 0 ? cufile_version_text(library->version) : "";
  return py::make_tuple(to_text(library->path), library->found, version, "");
}

}  // namespace

void bind_gds_lane(py::module_& m) {
  const GdsOptions defaults;
  m.def("gpudirect_refusal", &gpudirect_refusal, py::call_guard<py::gil_scoped_release>());
  m.def(
      "set_cufile_wheels", [](List<std::string> paths) { set_cufile_wheels(std::move(paths)); },
      py::arg("paths"));
  m.def("find_cufile", &find_cufile);
  NativeBinding<GdsLane, Lane, std::shared_ptr<GdsLane>>(m, "GdsLane")
      .def(py::init(&make_gds_lane), py::arg("codecs"), py::arg("stripe"), py::arg("slabs"), py::kw_only(),
           py::arg("threads_per_device") = defaults.threads_per_device,
           py::arg("use_staged_transfer") = defaults.use_staged_transfer,
           py::arg("max_staging_blocks") = defaults.max_staging_blocks,
           py::arg("max_staging_bytes") = defaults.max_staging_bytes, py::arg("gpu_device_id") = kHostDevice,
           py::arg("io") = "auto", py::arg("register_pool") = "auto")
      .def(
          "describe",
          [](const GdsLane& lane) { return to_text(without_gil([&] { return lane.manager().describe(); })); })
      .def_property_readonly("direct_refusal",
                             [](const GdsLane& lane) {
                               return to_text(without_gil([&] { return lane.manager().direct_refusal(); }));
                             })
      .def_property_readonly(
          "totals",
          [](const GdsLane& lane) { return to_dict(without_gil([&] { return lane.manager().totals(); })); })
      .def_property_readonly(
          "pool",
          [](const GdsLane& lane) { return to_dict(without_gil([&] { return lane.manager().pool(); })); })
      .def_property_readonly(
          "staging_bytes",
          [](const GdsLane& lane) { return without_gil([&] { return lane.manager().staging_bytes(); }); })
      .def_property_readonly("staging_slots",
                             [](const GdsLane& lane) {
                               return without_gil([&] { return lane.manager().staging_slots().slots; });
                             })
      .def_property_readonly("staging_slot_bytes",
                             [](const GdsLane& lane) {
                               return without_gil([&] { return lane.manager().staging_slots().slot_bytes; });
                             })
      .def("reserve_staging", &GdsLane::reserve_staging, py::arg("group"), py::arg("view"),
           py::call_guard<py::gil_scoped_release>())
      .def("release_pool", &GdsLane::release_pool, py::call_guard<py::gil_scoped_release>())
      .def("restore_pool", &GdsLane::restore_pool, py::call_guard<py::gil_scoped_release>())
      .def("close", &GdsLane::close, py::call_guard<py::gil_scoped_release>())
      .def("counts", [](const GdsLane& lane) { return to_dict(lane.counts()); });
}

}  // namespace flexkv
