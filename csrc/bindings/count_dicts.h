// Converts counters to Python dicts.
#pragma once
#include <pybind11/pybind11.h>

#include "gds/gds_manager.h"
#include "storage/disk.h"

namespace flexkv {

pybind11::dict to_dict(const DiskCounts& counts);
pybind11::dict to_dict(const GdsTotals& totals);
pybind11::dict to_dict(const PoolState& pool);

}  // namespace flexkv
