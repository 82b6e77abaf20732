// The tables of a transform that are the same for all batches of a transfer. They are made once per transfer.
#pragma once
#include <vector>

#include "gds/page_map.h"
#include "gds/transform/arithmetic.h"

namespace flexkv {

struct TransformTables {
  // Throws GeometryError if a page has more leaves than a launch can count.
  TransformTables(const PageMap& map, bool into_pool);

  std::vector<TransformRun> runs;
  std::vector<TransformLeaf> leaves;
  int64_t digest_offset;
  TransformMode mode;
};

// Returns a batch that points to `tables`, which must outlive the batch. The caller sets pages, num_pages,
// progress and bad_run.
TransformBatch host_batch(const TransformTables& tables);

}  // namespace flexkv
