// The parts of a transform that stay the same from batch to batch, made once per transfer.
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

// A batch over `tables`, which must outlive it. The caller sets pages, num_pages, progress and bad_run.
TransformBatch host_batch(const TransformTables& tables);

}  // namespace flexkv
