#include "share/peer_news.h"

#include <algorithm>
#include <utility>

namespace flexkv {
namespace {

// Unit: records. A record that was taken or replaced is a passed record; the others are pending. Passed
// records are removed when there are this many more passed records than pending records.
constexpr size_t kMostPassed = 4096;

}  // namespace

void PendingNews::mark(const PageName& name) {
  const size_t bit = NameHash{}(name) % kMarks;
  marks_[bit / 64] |= uint64_t{1} << (bit % 64);
}

bool PendingNews::is_marked(const PageName& name) const {
  const size_t bit = NameHash{}(name) % kMarks;
  return ((marks_[bit / 64] >> (bit % 64)) & 1) != 0;
}

void PendingNews::tell(const RowFacts& facts, bool there) {
  const PageName name{facts.key, facts.group};
  const std::lock_guard lock(mutex_);
  bool went = !there;
  const auto [found, is_new] = at_.try_emplace(name, records_.size());
  if (!is_new) {
    Record& former = records_[std::exchange(found->second, records_.size())];
    went |= former.went;
    former.passed = true;
  }
  records_.push_back({{facts.key, facts.group, facts.tokens, facts.expiry, there}, went, false});
  mark(name);
  size_.store(at_.size(), std::memory_order_release);
  if (records_.size() > 2 * at_.size() + kMostPassed) compact();
}

size_t PendingNews::take(size_t most, std::vector<PeerNews>& out) {
  std::vector<Record> moved;
  const std::lock_guard lock(mutex_);
  for (; first_ < records_.size() && moved.size() < most; ++first_) {
    Record& record = records_[first_];
    if (record.passed) continue;
    pass(record, moved);
    at_.erase({record.last.key, record.last.group});
  }
  end_take(moved, out);
  return moved.size();
}

size_t PendingNews::take_of(std::span<const BlockKey> keys, uint32_t group, std::vector<PeerNews>& out) {
  std::vector<Record> moved;
  std::vector<size_t> places;
  const std::lock_guard lock(mutex_);
  for (const BlockKey& key : keys) {
    const PageName name{key, group};
    if (!is_marked(name)) continue;
    const auto found = at_.find(name);
    if (found == at_.end()) continue;
    places.push_back(found->second);
    at_.erase(found);
  }
  std::ranges::sort(places);
  for (const size_t place : places) pass(records_[place], moved);
  end_take(moved, out);
  return moved.size();
}

void PendingNews::pass(Record& record, std::vector<Record>& moved) {
  record.passed = true;
  moved.push_back(record);
}

void PendingNews::end_take(std::vector<Record>& moved, std::vector<PeerNews>& out) {
  out.clear();
  for (const Record& record : moved) {
    if (!record.went) continue;
    out.push_back(record.last);
    out.back().there = false;
  }
  for (const Record& record : moved) {
    if (record.last.there) out.push_back(record.last);
  }
  size_.store(at_.size(), std::memory_order_release);
  if (at_.empty() && !records_.empty()) compact();
}

void PendingNews::compact() {
  std::erase_if(records_, [](const Record& record) { return record.passed; });
  first_ = 0;
  marks_.fill(0);
  for (size_t place = 0; place < records_.size(); ++place) {
    const PageName name{records_[place].last.key, records_[place].last.group};
    at_[name] = place;
    mark(name);
  }
}

}  // namespace flexkv
