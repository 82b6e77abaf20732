#include <algorithm>
#include <utility>

#include "fake_cuda_device.h"

namespace flexkv::fake_cuda {
namespace {

void run(FakeStream* stream) {
  World& w = world();
  std::unique_lock lock(w.mutex);
  for (;;) {
    w.changed.wait(lock, [&] { return stream->ends || (!stream->held && !stream->queue.empty()); });
    if (stream->ends) return;
    auto work = std::move(stream->queue.front());
    stream->queue.pop_front();
    stream->busy = true;
    lock.unlock();
    work();
    lock.lock();
    stream->busy = false;
    w.changed.notify_all();
  }
}

}  // namespace

World& world() {
  static auto* one = new World();
  return *one;
}

void require(bool good, const char* rule) {
  if (!good) world().violations.emplace_back(rule);
}

FakeStream* new_stream(bool held, int device) {
  auto* stream = new FakeStream();
  stream->held = held;
  stream->device = device;
  world().streams.insert(stream);
  stream->thread = std::thread(run, stream);
  return stream;
}

void push(FakeStream* stream, std::function<void()> work) {
  stream->queue.push_back(std::move(work));
  world().changed.notify_all();
}

void end_stream(FakeStream* stream) {
  {
    const std::lock_guard lock(world().mutex);
    stream->ends = true;
    world().streams.erase(stream);
    world().changed.notify_all();
  }
  stream->thread.join();
  delete stream;
}

void reset(const Settings& settings) {
  World& w = world();
  const std::lock_guard lock(w.mutex);
  w.settings = settings;
  w.calls = {};
  w.bytes_in_flight = {};
  w.kernels_in_flight = {};
  w.long_stores_in_flight = 0;
  w.violations.clear();
  if (!w.streams.empty()) w.violations.emplace_back("streams of an earlier test are left");
  if (!w.registered.empty()) w.violations.emplace_back("memory of an earlier test is still registered");
  w.registered.clear();
  if (!w.primary_contexts.empty()) w.violations.emplace_back("contexts of an earlier test are left");
  w.primary_contexts.clear();
  if (!w.captures.empty()) w.violations.emplace_back("a capture of an earlier test is left");
  w.captures.clear();
  w.allocations.clear();
  w.refusals.clear();
  w.on_free = nullptr;
  w.registrations_to_refuse = 0;
  w.launches_to_fail = 0;
  w.fail_in = -1;
  w.break_next = false;
}
Calls calls() {
  const std::lock_guard lock(world().mutex);
  return world().calls;
}
std::vector<std::string> violations() {
  const std::lock_guard lock(world().mutex);
  return world().violations;
}
bool take_violation(const std::string& words) {
  const std::lock_guard lock(world().mutex);
  return std::erase_if(world().violations,
                       [&](const std::string& rule) { return rule.find(words) != std::string::npos; }) > 0;
}
std::map<void*, size_t> registered() {
  const std::lock_guard lock(world().mutex);
  return world().registered;
}
void fail_copy(int64_t nth) {
  const std::lock_guard lock(world().mutex);
  world().fail_in = nth;
}
void break_stream(bool breaks) {
  const std::lock_guard lock(world().mutex);
  world().break_next = breaks;
}
uintptr_t make_stream(bool held, int device) {
  const std::lock_guard lock(world().mutex);
  return reinterpret_cast<uintptr_t>(new_stream(held, device));
}
void enqueue(uintptr_t stream, std::function<void()> work) {
  const std::lock_guard lock(world().mutex);
  push(reinterpret_cast<FakeStream*>(stream), std::move(work));
}
void hold_all(bool held) {
  const std::lock_guard lock(world().mutex);
  for (FakeStream* stream : world().streams) stream->held = held;
  world().changed.notify_all();
}
void release_stream(uintptr_t stream) {
  const std::lock_guard lock(world().mutex);
  reinterpret_cast<FakeStream*>(stream)->held = false;
  world().changed.notify_all();
}
void drain(uintptr_t stream) {
  auto* one = reinterpret_cast<FakeStream*>(stream);
  std::unique_lock lock(world().mutex);
  world().changed.wait(lock, [&] { return one->queue.empty() && !one->busy; });
}
void settle() {
  std::unique_lock lock(world().mutex);
  world().changed.wait(lock, [] {
    return std::all_of(world().streams.begin(), world().streams.end(),
                       [](const FakeStream* one) { return one->queue.empty() && !one->busy; });
  });
}
void destroy_stream(uintptr_t stream) { end_stream(reinterpret_cast<FakeStream*>(stream)); }

}  // namespace flexkv::fake_cuda
