// Declares one binding function per area; bind_<area>.cpp defines it. module.cpp calls these functions.
// Comments show where the order of the calls matters.
#pragma once
#include <pybind11/pybind11.h>

namespace flexkv {

void bind_cuda(pybind11::module_& m);
void bind_gds(pybind11::module_& m);
void bind_gds_lane(pybind11::module_& m);  // after bind_transfer (for Lane) and bind_storage (for PageCodec)
void bind_index(pybind11::module_& m);
void bind_keys(pybind11::module_& m);
void bind_layout(pybind11::module_& m);
void bind_lookup(pybind11::module_& m);  // after bind_index: lookups take block indexes
void bind_pool(pybind11::module_& m);
void bind_rope(pybind11::module_& m);
void bind_share(pybind11::module_& m);    // after bind_index and bind_pool, whose classes it uses
void bind_storage(pybind11::module_& m);  // after bind_transfer: DiskLane derives from Lane
void bind_transfer(pybind11::module_& m);

}  // namespace flexkv
