#include "cuda/cuda_lane.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/nvtx.h"
#include "cuda/event.h"

namespace flexkv::cuda {
namespace {

constexpr size_t kDirections = 2;
constexpr size_t kThreads = kDirections + 1;

Direction direction_of(OpKind kind) {
  return kind == OpKind::kH2D ? Direction::kToDevice : Direction::kToHost;
}

// A work item that was taken and is enqueued portion by portion. The issuing thread makes it, the ending one
// ends it.
struct Issuing {
  std::shared_ptr<WorkItem> item;
  std::vector<MoveResult> results;
  std::vector<PageEnds> pages;  // that may be copied
  std::vector<int32_t> slots;   // of all pages, where the view has digests
  bool registered = true;
  int32_t layers = 0;                          // of a page
  int32_t cut_layers = 0;                      // layers before it are in `portions`
  std::vector<std::vector<Segment>> portions;  // one enqueued after the other, each of at most a piece
  size_t next_portion = 0;
  bool failed = false;  // a portion could not be enqueued
  // Guarded by the lane's lock:
  bool all_enqueued = false;  // nothing is left to enqueue, or it failed; the issuing thread changes it
  int in_flight = 0;          // portions that have not ended
};

std::shared_ptr<Issuing> begin_issuing(const std::shared_ptr<WorkItem>& item) {
  auto issuing = std::make_shared<Issuing>();
  issuing->item = item;
  issuing->results.resize(item->positions().size());
  return issuing;
}

// A portion whose copies were enqueued.
struct Issued {
  std::shared_ptr<Issuing> of;
  std::shared_ptr<Event> event;  // null: nothing was enqueued, as where extend_one() has an item ended; or
                                 // the stream was waited for
  std::string error;
};

}  // namespace

struct CudaLane::Shared {
  Shared(std::shared_ptr<Device> the_device, KernelLauncher launcher, const CopySwitches& switches,
         std::unique_ptr<DigestCrew> the_digests)
      : device(std::move(the_device)),
        current(std::in_place, *device),
        copier(device, launcher, switches),
        most_bytes{cuda::piece_bytes(copier.link_rate(Direction::kToDevice), kSubBatchBytes),
                   cuda::piece_bytes(copier.link_rate(Direction::kToHost), kSubBatchBytes)},
        streams{std::make_unique<Stream>(device), std::make_unique<Stream>(device)},
        digests(std::move(the_digests)) {
    current.reset();
  }

  // The threads hold the source: kept here, scheduler and lane would hold each other for ever.
  void note_started(const std::string& refusal);
  void issue_all(WorkSource& source, int32_t lane);
  void end_all(WorkSource& source, size_t direction);
  bool issue_one(WorkSource& source, int32_t lane);
  bool issue_expedited(WorkSource& source, int32_t lane);
  std::shared_ptr<Issuing> extend_one(WorkSource& source);
  void list_pages(Issuing& issuing);
  std::string cut(Issuing& issuing);
  void issue(WorkSource& source, std::shared_ptr<Issuing> issuing, bool in_turn = true);
  void push(Issued issued_now, size_t direction);

  const std::shared_ptr<Device> device;
  std::optional<Current> current;  // while the copier makes its self-test
  Copier copier;
  // Unit: bytes. Of a piece, by direction.
  const std::array<int64_t, kDirections> most_bytes;
  const std::array<std::unique_ptr<Stream>, kDirections> streams;
  const std::unique_ptr<DigestCrew> digests;

  std::mutex mutex;
  std::condition_variable to_issue;
  std::array<std::condition_variable, kDirections> to_end;
  std::array<std::deque<Issued>, kDirections> issued;
  std::array<int, kDirections> in_flight{};
  std::vector<std::shared_ptr<Issuing>> stores;  // that have begun and not ended
  // The issuing thread's. A work item here has portions left, which go on as those before them arrive.
  std::array<std::shared_ptr<Issuing>, kDirections> unfinished;
  std::array<int, kDirections> next_staging{};
  size_t started = 0;   // threads that have the device current, or were refused it
  std::string refused;  // why one was
  bool woken = false;
  bool ending = false;
  bool issuing = false;  // the issuing thread runs, or is about to
};

// Empty is `refusal`, or why the calling thread does not have the device current.
void CudaLane::Shared::note_started(const std::string& refusal) {
  const std::lock_guard lock(mutex);
  ++started;
  if (refused.empty()) refused = refusal;
  to_issue.notify_one();
}

// The issuing thread. Never holds `mutex` while it asks the scheduler, which wakes lanes under its own lock.
void CudaLane::Shared::issue_all(WorkSource& source, int32_t lane) {
  const QuietCurrent here(*device);
  note_started(here.error());
  for (;;) {
    {
      std::unique_lock lock(mutex);
      // Nothing is enqueued before it is known that its end can be waited for.
      to_issue.wait(lock, [&] { return (woken && started == kThreads) || ending; });
      if (ending) {
        issuing = false;
        for (auto& condition : to_end) condition.notify_all();
        return;
      }
      woken = false;
    }
    while (issue_expedited(source, lane) || issue_one(source, lane)) continue;
  }
}

// Enqueues all that is left of one expedited item, however much is under way: what is may stand behind a
// forward that runs. False: there is none.
bool CudaLane::Shared::issue_expedited(WorkSource& source, int32_t lane) {
  const auto number = static_cast<size_t>(Direction::kToHost);
  std::shared_ptr<Issuing> now = unfinished[number];
  if (now && now->item->expedited()) {
    unfinished[number] = nullptr;  // the rest of one that began in its turn
  } else if (now = extend_one(source); !now) {
    const std::shared_ptr<WorkItem> item = source.try_take_expedited(lane);
    if (!item) return false;
    now = begin_issuing(item);
  }
  while (!now->all_enqueued) issue(source, now, false);
  return true;
}

// A store of an expedited op that is enqueued to its end and has not ended, once the later layers of its
// pages are added to it. Null: there is none.
std::shared_ptr<Issuing> CudaLane::Shared::extend_one(WorkSource& source) {
  constexpr auto kNumber = static_cast<size_t>(Direction::kToHost);
  const auto may_grow = [](const Issuing& one) {
    return one.all_enqueued && !one.failed && one.cut_layers < one.layers && one.item->expedited();
  };
  for (size_t refused = 0;; ++refused) {
    std::shared_ptr<Issuing> one;
    {
      const std::lock_guard lock(mutex);
      size_t passed = 0;
      const auto found = std::ranges::find_if(
          stores, [&](const auto& store) { return may_grow(*store) && passed++ == refused; });
      if (found == stores.end()) return nullptr;
      one = *found;
      one->all_enqueued = false;  // from here on the thread that ends it leaves it open
    }
    if (source.extend(one->item)) return one;
    const std::lock_guard lock(mutex);
    one->all_enqueued = true;
    // The last of it arrived meanwhile.
    if (one->in_flight == 0) push({one, nullptr, {}}, kNumber);
  }
}

// Enqueues one portion, of a work item that has begun or of another. False: there is none, or no room for it.
bool CudaLane::Shared::issue_one(WorkSource& source, int32_t lane) {
  static constexpr std::array kKinds = {OpKind::kH2D, OpKind::kD2H};
  KindSet allowed = 0;
  for (size_t direction = 0; direction < kDirections; ++direction) {
    {
      const std::lock_guard lock(mutex);
      if (in_flight[direction] >= kItemsInFlight) continue;
    }
    if (unfinished[direction]) {
      issue(source, unfinished[direction]);
      return true;
    }
    allowed |= kind_bit(kKinds[direction]);
  }
  const std::shared_ptr<WorkItem> item = allowed != 0 ? source.try_take(lane, allowed) : nullptr;
  if (!item) return false;
  const auto now = begin_issuing(item);
  unfinished[static_cast<size_t>(direction_of(item->kind()))] = now;
  issue(source, now);
  return true;
}

// Lists what of the item may be copied, and fills in what may not.
void CudaLane::Shared::list_pages(Issuing& issuing) {
  const WorkItem& item = *issuing.item;
  const Direction direction = direction_of(item.kind());
  const AttachedView& view = *item.page(0).view;
  for (size_t i = 0; view.has_digests() && i < issuing.results.size(); ++i) {
    issuing.slots.push_back(item.page(i).slot);
  }
  if (direction == Direction::kToDevice && view.has_digests()) {
    digests->check(view, issuing.slots, item.layer_lo(), item.layer_hi(), issuing.results);
  }
  for (size_t i = 0; i < issuing.results.size(); ++i) {
    if (issuing.results[i].status != Status::kOk) continue;
    const PageMove page = item.page(i);
    issuing.pages.push_back({page.block, view.stripe(page.slot), view.pool().pieces().piece_of(page.slot)});
    issuing.registered = issuing.registered && view.pool().registered(page.slot);
  }
}

// Cuts the layers that the item has by now and had not before, and makes the stream wait for the engine's.
// Empty, or why nothing of them may be enqueued.
std::string CudaLane::Shared::cut(Issuing& issuing) {
  const WorkItem& item = *issuing.item;
  const Direction direction = direction_of(item.kind());
  const AttachedView& view = *item.page(0).view;
  if (issuing.cut_layers == 0) list_pages(issuing);
  const int32_t lo = std::max(issuing.cut_layers, item.layer_lo());
  issuing.layers = view.view().num_layers();
  issuing.cut_layers = item.layer_hi();
  const std::span<const Segment> segments = view.segments(lo, item.layer_hi());
  // Longer is a page alone, of which it is a single layer or no more than kSubBatchBytes, or all that is left
  // of expedited ones.
  const auto pages = static_cast<int64_t>(std::max<size_t>(1, issuing.pages.size()));
  const int64_t most = most_bytes[static_cast<size_t>(direction)];
  if (const int64_t bytes = view.layer_bytes(lo, item.layer_hi()); bytes * pages > most) {
    for (auto& portion : cut_to_portions(segments, portion_bytes(bytes, most / pages))) {
      issuing.portions.push_back(std::move(portion));
    }
  } else {
    issuing.portions.emplace_back(segments.begin(), segments.end());
  }
  // The engine's stream first: what a store reads must have been written, and what a load overwrites must
  // have been read by the forwards enqueued before.
  if (item.fence() == nullptr) return {};
  return item.fence()->make_wait(
      reinterpret_cast<StreamId>(streams[static_cast<size_t>(direction)]->handle()));
}

// `in_turn`: it is one of the kItemsInFlight that have tables of the kernel.
void CudaLane::Shared::issue(WorkSource& source, std::shared_ptr<Issuing> issuing, bool in_turn) {
  const nvtx::Range range("flexkv issue");
  const Direction direction = direction_of(issuing->item->kind());
  const auto number = static_cast<size_t>(direction);
  const StreamHandle stream = streams[number]->handle();
  // In order, so with kItemsInFlight under way at most the one whose turn it is has ended.
  const int staging = in_turn ? next_staging[number] : Copier::kNoStaging;
  if (in_turn) next_staging[number] = (staging + 1) % Copier::kStagings;
  // All threads have started, so that this does not change any more.
  Issued issued_now{issuing, nullptr, refused};
  const bool begins = issuing->cut_layers == 0;
  try {
    if (issued_now.error.empty() && issuing->cut_layers < issuing->item->layer_hi()) {
      issued_now.error = cut(*issuing);
    }
    if (issued_now.error.empty()) {
      issued_now.error = copier.enqueue(direction, issuing->portions[issuing->next_portion++], issuing->pages,
                                        issuing->registered, staging, stream);
    }
  } catch (const std::exception& failure) {
    issued_now.error = failure.what();
  }
  try {
    // Also after a failure: what was enqueued before it moves, and the pages stay pinned until it has ended.
    if (refused.empty()) issued_now.event = std::make_shared<Event>(device, stream);
  } catch (const std::exception& failure) {
    if (issued_now.error.empty()) issued_now.error = failure.what();
    // Without an event the stream itself is waited for; of a context that is broken nothing moves any more.
    device->driver().stream_synchronize(stream);
  }
  issuing->failed = !issued_now.error.empty();
  const bool last = issuing->failed || issuing->next_portion == issuing->portions.size();
  if (last && in_turn) unfinished[number] = nullptr;
  if (last && !issuing->failed) source.issued(issuing->item, issued_now.event);
  const std::lock_guard lock(mutex);
  issuing->all_enqueued = last;
  if (begins && direction == Direction::kToHost) stores.push_back(issuing);
  push(std::move(issued_now), number);
}

// For the thread that ends the items of that direction. Under the lock.
void CudaLane::Shared::push(Issued issued_now, size_t direction) {
  ++in_flight[direction];
  ++issued_now.of->in_flight;
  issued[direction].push_back(std::move(issued_now));
  to_end[direction].notify_one();
}

// The thread that ends the items of one direction, in the order of its stream.
void CudaLane::Shared::end_all(WorkSource& source, size_t direction) {
  const QuietCurrent here(*device);
  note_started(here.error());
  for (;;) {
    Issued next;
    {
      std::unique_lock lock(mutex);
      // Until nothing can be added any more.
      to_end[direction].wait(lock, [&] { return !issued[direction].empty() || (ending && !issuing); });
      if (issued[direction].empty()) return;
      next = std::move(issued[direction].front());
      issued[direction].pop_front();
    }
    // Of a profiler's time line: what of the piece's copies had not arrived when those before it had been
    // ended, then a store's digests, and its end in the scheduler.
    const nvtx::Range range(direction == static_cast<size_t>(Direction::kToDevice) ? "flexkv H2D"
                                                                                   : "flexkv D2H");
    if (const std::string error = next.event ? next.event->wait() : std::string(); next.error.empty()) {
      next.error = error;
    }
    Issuing& issuing = *next.of;
    const WorkItem& item = *issuing.item;
    bool fine = true;
    for (MoveResult& result : issuing.results) {
      if (result.status == Status::kOk && !next.error.empty()) {
        result = {Status::kFailed, next.error, {}, FailureCause::kTransport};
      }
      fine = fine && result.status == Status::kOk;
    }
    bool last = false;
    {
      const std::lock_guard lock(mutex);
      last = --issuing.in_flight == 0 && issuing.all_enqueued;
      if (last) std::erase(stores, next.of);  // from here on nothing is added to it
    }
    // The pages of a store are fine together, or none is.
    if (fine && last && direction == static_cast<size_t>(Direction::kToHost) && !issuing.slots.empty()) {
      digests->write(*item.page(0).view, issuing.slots, item.layer_lo(), item.layer_hi());
    }
    issuing.item->touch();
    {
      const std::lock_guard lock(mutex);
      --in_flight[direction];
      woken = true;
      to_issue.notify_one();
    }
    if (last) source.finish(issuing.item, issuing.results);
  }
}

CudaLane::CudaLane(std::shared_ptr<Device> device, KernelLauncher launcher, const CopySwitches& switches,
                   std::unique_ptr<DigestCrew> digests)
    : device_(std::move(device)),
      name_("cuda:" + std::to_string(device_->ordinal())),
      shared_(std::make_shared<Shared>(device_, launcher, switches, std::move(digests))) {}

CudaLane::~CudaLane() { abandon(); }

int64_t CudaLane::piece_bytes(OpKind kind) const {
  return shared_->most_bytes[static_cast<size_t>(direction_of(kind))];
}

void CudaLane::start(std::shared_ptr<WorkSource> source, int32_t lane) {
  const auto run = [&](auto work, const char* name) {
    threads_.emplace_back(work);
    pthread_setname_np(threads_.back().native_handle(), name);
  };
  // One after the other, so that a start which ran out of threads can be tried again.
  if (threads_.empty()) run([shared = shared_, source] { shared->end_all(*source, 0); }, "flexkv-h2d");
  if (threads_.size() == 1) run([shared = shared_, source] { shared->end_all(*source, 1); }, "flexkv-d2h");
  if (threads_.size() > 2) return;
  const auto set_issuing = [&](bool issuing) {
    const std::lock_guard lock(shared_->mutex);
    shared_->issuing = issuing;
  };
  set_issuing(true);
  try {
    run([shared = shared_, source, lane] { shared->issue_all(*source, lane); }, "flexkv-cuda");
  } catch (...) {
    set_issuing(false);
    throw;
  }
}

void CudaLane::wake() {
  const std::lock_guard lock(shared_->mutex);
  shared_->woken = true;
  shared_->to_issue.notify_one();
}

std::shared_ptr<StreamEvent> CudaLane::record(StreamId stream) { return record_engine(device_, stream); }

void CudaLane::make_wait(StreamEvent& event, StreamId stream) {
  const Current here(*device_);
  require_no_capture(*device_, reinterpret_cast<StreamHandle>(stream));
  if (const std::string error = event.make_wait(stream); !error.empty()) throw CapacityError(error);
}

const Copier& CudaLane::copier() const { return shared_->copier; }

void CudaLane::join() {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->ending = true;
    shared_->to_issue.notify_all();
    for (auto& condition : shared_->to_end) condition.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  shared_->digests->join();
}

void CudaLane::abandon() {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->ending = true;
    shared_->to_issue.notify_all();
    for (auto& condition : shared_->to_end) condition.notify_all();
  }
  for (std::thread& thread : threads_) thread.detach();
  threads_.clear();
  shared_->digests->abandon();
}

}  // namespace flexkv::cuda
