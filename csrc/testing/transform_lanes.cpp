#include "testing/transform_lanes.h"

#include <array>
#include <cstddef>
#include <deque>
#include <utility>

#include "gds/transform/tables.h"
#include "testing/transform_device_around.h"

namespace flexkv {
namespace {

struct OneThread {
  static uint64_t add(uint64_t* value, uint64_t amount) {
    const uint64_t before = *value;
    *value += amount;
    return before;
  }
  static void min(int32_t* value, int32_t other) {
    if (other < *value) *value = other;
  }
  static void fence() {}
};

using WarpSums = std::array<LaneLeafSums, kTransformLanes>;

// Does the reduction that the kernel does with shuffles: adds the sums of pairs of lanes until one sum per
// group is left. In each step, the distance between the two lanes of a pair is halved. Then folds these sums.
uint64_t reduce_and_fold_leaf(WarpSums& sums) {
  for (int distance = kTransformLanes / 2; distance >= kSumGroups; distance /= 2) {
    for (int lane = 0; lane < distance; ++lane) {
      auto& mine = sums[static_cast<size_t>(lane)];
      const auto& other = sums[static_cast<size_t>(lane + distance)];
      mine.even.add(other.even);
      mine.odd.add(other.odd);
    }
  }
  uint64_t folded = 0;
  for (int lane = 0; lane < kSumGroups; ++lane) folded += fold_sums(sums[static_cast<size_t>(lane)], lane);
  return folded;
}

template <bool kDigest, bool kCopy>
void run(const TransformBatch& batch, int32_t page, const TransformLeaf& leaf) {
  const LeafEnds ends = leaf_ends(batch, page, leaf);
  WarpSums sums;
  for (int lane = kTransformLanes - 1; lane >= 0; --lane) {
    sums[static_cast<size_t>(lane)] = move_leaf_lane<kDigest, kCopy>(ends, leaf.bytes, lane);
  }
  if constexpr (kDigest) end_leaf<OneThread>(batch, page, leaf, reduce_and_fold_leaf(sums));
}

using RunBatch = std::function<void(const TransformBatch&)>;

class CalledTransformer : public Transformer {
 public:
  CalledTransformer(const PageMap& map, bool into_pool, const RunBatch& run)
      : tables_(map, into_pool), run_(run) {}

  void launch(std::span<const TransformPage> pages) override {
    BatchResult result;
    result.bad_run.assign(pages.size(), kNoBadRun);
    std::vector<RunProgress> progress(pages.size() * tables_.runs.size());
    TransformBatch batch = host_batch(tables_);
    batch.pages = pages.data();
    batch.num_pages = static_cast<int32_t>(pages.size());
    batch.progress = progress.data();
    batch.bad_run = result.bad_run.data();
    run_(batch);
    done_.push_back(std::move(result));
  }

  BatchResult wait() override {
    BatchResult result = std::move(done_.front());
    done_.pop_front();
    return result;
  }

 private:
  TransformTables tables_;
  RunBatch run_;
  std::deque<BatchResult> done_;
};

class CalledTransformDevice : public TransformDeviceAround {
 public:
  CalledTransformDevice(std::string name, RunBatch run)
      : TransformDeviceAround(host_transform_device()), name_(std::move(name)), run_(std::move(run)) {}
  std::string name() const override { return name_; }
  std::unique_ptr<Transformer> transformer(const PageMap& map, bool into_pool, int32_t,
                                           StreamEvent*) override {
    return std::make_unique<CalledTransformer>(map, into_pool, run_);
  }

 private:
  const std::string name_;
  const RunBatch run_;
};

}  // namespace

std::shared_ptr<TransformDevice> transform_device_of(std::string name, RunBatch run) {
  return std::make_shared<CalledTransformDevice>(std::move(name), std::move(run));
}

std::shared_ptr<TransformDevice> lane_transform_device() {
  return transform_device_of("host, lane by lane", &transform_lane_by_lane);
}

void transform_lane_by_lane(const TransformBatch& batch) {
  for (int32_t page = batch.num_pages - 1; page >= 0; --page) {
    for (int32_t i = batch.num_leaves - 1; i >= 0; --i) {
      if (in_pool(batch.mode)) {
        run<true, false>(batch, page, batch.leaves[i]);
      } else if (has_digests(batch.mode)) {
        run<true, true>(batch, page, batch.leaves[i]);
      } else {
        run<false, true>(batch, page, batch.leaves[i]);
      }
    }
  }
}

}  // namespace flexkv
