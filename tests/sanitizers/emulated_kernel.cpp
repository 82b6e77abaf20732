// Launches the transform kernel once on the CPU. It copies and digests two runs of four leaves each. If the
// program has an argument, the kernel reads its last leaf past the end of the pool.
#include "../native/emulated_cuda.h"
// Must come after emulated_cuda.h, which defines the keywords of CUDA.
#include "gds/transform/kernel.cuh"

using namespace flexkv;

int main(int count, char**) {
  constexpr int32_t kRuns = 2, kLeaves = 4;
  constexpr size_t kBytes = kRuns * kLeaves * kLeafBytes;
  // The pool ends where its allocation ends, so that the sanitizer finds a read past its end.
  std::vector<Vector16> pool(kBytes / 16), slot(kBytes / 16 + kRuns);
  std::vector<TransformRun> runs;
  std::vector<TransformLeaf> leaves;
  for (int32_t run = 0; run < kRuns; ++run) {
    const int64_t offset = run * kLeaves * kLeafBytes;
    runs.push_back({reinterpret_cast<uintptr_t>(pool.data()) + static_cast<uintptr_t>(offset), 0, offset,
                    kLeaves * kLeafBytes, kLeaves});
    for (int64_t leaf = 0; leaf < kLeaves; ++leaf) leaves.push_back({run, kLeafBytes, leaf});
  }
  if (count > 1) leaves.back().index += 1;
  const TransformPage page{reinterpret_cast<uintptr_t>(slot.data()), 0};
  std::vector<RunProgress> progress(kRuns);
  int32_t bad_run = kNoBadRun;
  TransformBatch batch;
  batch.runs = runs.data();
  batch.leaves = leaves.data();
  batch.pages = &page;
  batch.progress = progress.data();
  batch.bad_run = &bad_run;
  batch.digest_offset = kBytes;
  batch.num_runs = kRuns;
  batch.num_leaves = kRuns * kLeaves;
  batch.num_pages = 1;
  batch.mode = TransformMode::kToSlotDigested;
  emulated::launch(2, 128, [&] { transform_kernel<true, true>(batch); });
  return 0;
}
