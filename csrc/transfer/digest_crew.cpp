#include "transfer/digest_crew.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "transfer/run_digests.h"

namespace flexkv {
namespace {

// The job of one caller. A thread of the crew looks at it only between two shares.
struct Post {
  DigestJob job;
  bool taken = false;  // a caller uses this job
  size_t next = 0;     // next share to take
  size_t shares = 0;
  int helping = 0;  // threads of the crew that have a share
  std::condition_variable helped;
};

}  // namespace

struct DigestCrew::Shared {
  static bool run(const std::shared_ptr<Shared>& shared, DigestWork work, const AttachedView& view,
                  std::span<const int32_t> slots, int32_t lo, int32_t hi, std::span<MoveResult> results);
  static void start_missing(const std::shared_ptr<Shared>& shared);
  Post* open_post();
  void help();
  void digest(Post& post, size_t share) const;
  std::vector<std::thread> end();

  size_t most = 0;  // threads of the crew
  OnShare on_share;

  std::mutex mutex;  // never held while bytes are digested
  std::condition_variable open;
  std::array<Post, 2> posts;  // one per DigestWork, so that no job queues
  std::vector<std::thread> threads;
  bool ending = false;
};

// Call under the lock. Checks come first, because a load waits for them, and so does the thread that enqueues
// all copies.
Post* DigestCrew::Shared::open_post() {
  const auto found =
      std::find_if(posts.begin(), posts.end(), [](const Post& post) { return post.next < post.shares; });
  return found == posts.end() ? nullptr : &*found;
}

void DigestCrew::Shared::digest(Post& post, size_t share) const {
  if (on_share) on_share(post.job.work());
  post.job.digest(share);
}

// A thread of the crew runs this.
void DigestCrew::Shared::help() {
  std::unique_lock lock(mutex);
  for (;;) {
    Post* post = nullptr;
    open.wait(lock, [&] { return ending || (post = open_post()) != nullptr; });
    if (ending) return;
    const size_t share = post->next++;
    ++post->helping;
    lock.unlock();
    digest(*post, share);
    lock.lock();
    if (--post->helping == 0) post->helped.notify_one();
  }
}

// Call under the lock. If the system refuses a thread, the next job asks again, so there is at most one
// failing call per job.
void DigestCrew::Shared::start_missing(const std::shared_ptr<Shared>& shared) {
  try {
    while (!shared->ending && shared->threads.size() < shared->most) {
      shared->threads.emplace_back([shared] { shared->help(); });
      pthread_setname_np(shared->threads.back().native_handle(), "flexkv-digest");
    }
  } catch (const std::exception&) {
    // The threads that did start help, or the caller works alone.
  }
}

// Returns false if the caller has to work alone; then nothing was done.
bool DigestCrew::Shared::run(const std::shared_ptr<Shared>& shared, DigestWork work, const AttachedView& view,
                             std::span<const int32_t> slots, int32_t lo, int32_t hi,
                             std::span<MoveResult> results) {
  const int64_t bytes = static_cast<int64_t>(slots.size()) * view.layer_bytes(lo, hi);
  if (shared->most == 0 || bytes < 2 * kDigestShareBytes) return false;
  Post& post = shared->posts[static_cast<size_t>(work)];
  {
    const std::lock_guard lock(shared->mutex);
    if (std::exchange(post.taken, true)) return false;
  }
  struct GiveBack {
    std::mutex& mutex;
    Post& post;
    ~GiveBack() {
      const std::lock_guard lock(mutex);
      post.taken = false;
    }
  } const give_back{shared->mutex, post};
  try {
    post.job.plan(work, view, slots, lo, hi);
  } catch (const std::bad_alloc&) {
    return false;
  }
  {
    std::unique_lock lock(shared->mutex);
    start_missing(shared);
    post.next = 0;
    post.shares = post.job.shares();
    const size_t helpers = std::min(shared->threads.size(), std::max<size_t>(post.shares, 1) - 1);
    for (size_t i = 0; i < helpers; ++i) shared->open.notify_one();
    while (post.next < post.shares) {
      const size_t share = post.next++;
      lock.unlock();
      shared->digest(post, share);
      lock.lock();
    }
    post.helped.wait(lock, [&] { return post.helping == 0; });
  }
  post.job.finish(results);
  return true;
}

// Call without the lock.
std::vector<std::thread> DigestCrew::Shared::end() {
  const std::lock_guard lock(mutex);
  ending = true;
  open.notify_all();
  return std::exchange(threads, {});
}

DigestCrew::DigestCrew(int32_t threads, OnShare on_share) : shared_(std::make_shared<Shared>()) {
  if (threads < 1 || threads > kMostDigestThreads) {
    throw ConfigError("digest_threads=" + std::to_string(threads) + ": must be in [1, " +
                      std::to_string(kMostDigestThreads) + "]");
  }
  shared_->most = static_cast<size_t>(threads) - 1;
  shared_->on_share = std::move(on_share);
}

DigestCrew::~DigestCrew() { join(); }

void DigestCrew::check(const AttachedView& view, std::span<const int32_t> slots, int32_t lo, int32_t hi,
                       std::span<MoveResult> results) {
  if (Shared::run(shared_, DigestWork::kCheck, view, slots, lo, hi, results)) return;
  for (size_t i = 0; i < slots.size(); ++i) results[i] = check_digests(view, slots[i], lo, hi);
}

void DigestCrew::write(const AttachedView& view, std::span<const int32_t> slots, int32_t lo,
                       int32_t hi) noexcept {
  if (Shared::run(shared_, DigestWork::kWrite, view, slots, lo, hi, {})) return;
  for (const int32_t slot : slots) write_digests_of_stripe(view, slot, lo, hi);
}

void DigestCrew::join() {
  for (std::thread& thread : shared_->end()) thread.join();
}

void DigestCrew::abandon() {
  for (std::thread& thread : shared_->end()) thread.detach();
}

}  // namespace flexkv
