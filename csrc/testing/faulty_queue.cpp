#include "testing/faulty_queue.h"

#include <algorithm>

#include "transfer/deadline.h"

namespace flexkv {

std::unique_ptr<IoQueue> IoFaults::wrap(std::unique_ptr<IoQueue> queue, int32_t disk) {
  return std::make_unique<FaultyQueue>(std::move(queue), shared_from_this(), disk);
}

std::optional<IoFaultRule> IoFaults::match(const IoRequest& request, int32_t disk) {
  const std::lock_guard lock(mutex_);
  for (IoFaultRule& rule : rules_) {
    if (rule.write && *rule.write != request.write) continue;
    if (rule.disk && *rule.disk != disk) continue;
    const bool covers =
        !rule.offset || (*rule.offset >= request.offset && *rule.offset < request.offset + request.bytes);
    if (!covers) continue;
    const int64_t number = rule.seen++;
    if (rule.nth && *rule.nth != number) continue;
    if (rule.times == 0) continue;
    if (rule.times > 0) --rule.times;
    ++acted_;
    return rule;
  }
  return std::nullopt;
}

void IoFaults::add(const IoFaultRule& rule) {
  const std::lock_guard lock(mutex_);
  rules_.push_back(rule);
}

void IoFaults::release() {
  const std::lock_guard lock(mutex_);
  rules_.clear();
  ++generation_;
  for (IoQueue* queue : queues_) queue->wake();
}

bool IoFaults::released_since(int64_t generation) const { return this->generation() > generation; }

int64_t IoFaults::generation() const {
  const std::lock_guard lock(mutex_);
  return generation_;
}

int64_t IoFaults::acted() const {
  const std::lock_guard lock(mutex_);
  return acted_;
}

void IoFaults::count_stalled(int64_t change) {
  const std::lock_guard lock(mutex_);
  stalled_ += change;
  changed_.notify_all();
}

bool IoFaults::wait_stalled(int64_t count, double deadline_s) {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, deadline_in(deadline_s), [&] { return stalled_ >= count; });
}

void IoFaults::on_release(IoQueue* queue) {
  const std::lock_guard lock(mutex_);
  queues_.push_back(queue);
}

void IoFaults::forget(IoQueue* queue) {
  const std::lock_guard lock(mutex_);
  std::erase(queues_, queue);
}

FaultyQueue::FaultyQueue(std::unique_ptr<IoQueue> inner, std::shared_ptr<IoFaults> faults, int32_t disk)
    : inner_(std::move(inner)), faults_(std::move(faults)), disk_(disk) {
  faults_->on_release(inner_.get());
}

FaultyQueue::~FaultyQueue() { faults_->forget(inner_.get()); }

void FaultyQueue::submit(const IoRequest& request) {
  const int64_t now = faults_->generation();
  const auto rule = faults_->match(request, disk_);
  if (!rule) {
    inner_->submit(request);
    return;
  }
  switch (rule->action) {
    case IoFaultAction::kFail:
      ready_.push_back({request.cookie, -rule->error});
      return;
    case IoFaultAction::kStall:
      held_.push_back({request, now});
      faults_->count_stalled(1);
      return;
    case IoFaultAction::kShort: {
      IoRequest less = request;
      less.bytes = std::min(rule->bytes, request.bytes);
      if (less.bytes == 0) {
        ready_.push_back({request.cookie, 0});
      } else {
        inner_->submit(less);
      }
      return;
    }
    case IoFaultAction::kCorrupt:
      marked_.push_back({request, *rule});
      // To damage a write, a bit of the write's buffer is flipped, and flipped back when the write has
      // finished. There is no other way to change the bytes that are written.
      if (request.write) request.buffer[rule->bytes] ^= std::byte{1};
      inner_->submit(request);
  }
}

void FaultyQueue::let_go() {
  std::vector<Held> still;
  for (const Held& held : held_) {
    if (!faults_->released_since(held.since)) {
      still.push_back(held);
      continue;
    }
    faults_->count_stalled(-1);
    inner_->submit(held.request);
  }
  held_ = std::move(still);
}

void FaultyQueue::spoil(IoDone& done) {
  const auto found = std::find_if(marked_.begin(), marked_.end(),
                                  [&](const Marked& m) { return m.request.cookie == done.cookie; });
  if (found == marked_.end()) return;
  found->request.buffer[found->rule.bytes] ^=
      std::byte{1};  // damages the bytes of a finished read, or repairs the buffer of a finished write
  marked_.erase(found);
}

void FaultyQueue::wait(std::vector<IoDone>& done) {
  if (!ready_.empty()) {
    // Makes the inner queue's wait() return at once, with the I/Os that have finished, if any.
    inner_->wake();
  }
  let_go();
  const size_t before = done.size();
  inner_->wait(done);
  hand_over(done, before);
}

void FaultyQueue::take(std::vector<IoDone>& done) {
  let_go();
  const size_t before = done.size();
  inner_->take(done);
  hand_over(done, before);
}

// From index `before` on, `done` has the I/Os that the inner queue has just finished. Flips the bit of each
// marked I/O among these. Then appends the I/Os that never reached the inner queue.
void FaultyQueue::hand_over(std::vector<IoDone>& done, size_t before) {
  for (size_t i = before; i < done.size(); ++i) spoil(done[i]);
  done.insert(done.end(), ready_.begin(), ready_.end());
  ready_.clear();
}

}  // namespace flexkv
