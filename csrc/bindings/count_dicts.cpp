#include "bindings/count_dicts.h"

#include "bindings/text.h"

namespace py = pybind11;

namespace flexkv {

py::dict to_dict(const DiskCounts& counts) {
  py::dict misses;
  for (size_t i = 1; i < kPageMisses; ++i) misses[kMissNames[i]] = counts.misses[i].load();
  py::dict all;
  all["read_pages"] = counts.read_pages.load();
  all["read_bytes"] = counts.read_bytes.load();
  all["written_pages"] = counts.written_pages.load();
  all["written_bytes"] = counts.written_bytes.load();
  all["zeroed_bytes"] = counts.zeroed_bytes.load();
  all["write_errors"] = counts.write_errors.load();
  all["misses"] = misses;
  return all;
}

py::dict to_dict(const GdsTotals& totals) {
  py::dict all;
  all["transfers"] = totals.transfers;
  all["pages"] = totals.pages;
  all["straight_pages"] = totals.straight_pages;
  all["failed_pages"] = totals.failed_pages;
  all["io_calls"] = totals.io_calls;
  all["bounced_calls"] = totals.bounced_calls;
  all["unknown_calls"] = totals.unknown_calls;
  all["io_bytes"] = totals.io_bytes;
  all["launches"] = totals.launches;
  return all;
}

py::dict to_dict(const PoolState& pool) {
  py::dict all;
  all["regions"] = pool.regions;
  all["pieces"] = pool.pieces;
  all["bytes"] = pool.bytes;
  all["registered"] = pool.registered;
  all["released"] = pool.released;
  all["refusal"] = to_text(pool.refusal);
  return all;
}

}  // namespace flexkv
