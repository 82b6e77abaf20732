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

// One caller's job. The crew's threads take its shares and work on them.
struct Post {
  DigestJob job;
  bool taken = false;  // whether a caller uses this object
  size_t next = 0;     // number of the next share to take
  size_t shares = 0;   // number of shares
  int helping = 0;     // number of the crew's threads that are working on a share
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

  size_t most = 0;  // maximum number of the crew's threads
  OnShare on_share;

  std::mutex mutex;  // never held while bytes are digested
  std::condition_variable open;
  std::array<Post, 2> posts;  // one per DigestWork, so that checks and writes do not wait for each other
  std::vector<std::thread> threads;
  bool ending = false;
};

// Returns a job that has shares which no thread has taken, or null if there is none. Prefers checks, because
// loads and the thread that enqueues all copies wait for them. Precondition: the caller holds the lock.
Post* DigestCrew::Shared::open_post() {
  const auto found =
      std::find_if(posts.begin(), posts.end(), [](const Post& post) { return post.next < post.shares; });
  return found == posts.end() ? nullptr : &*found;
}

void DigestCrew::Shared::digest(Post& post, size_t share) const {
  if (on_share) on_share(post.job.work());
  post.job.digest(share);
}

// The body of the crew's threads.
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

// Starts the crew's threads that are not running yet. If the system refuses to start a thread, this function
// returns, and the next job tries again to start it. Precondition: the caller holds the lock.
void DigestCrew::Shared::start_missing(const std::shared_ptr<Shared>& shared) {
  try {
    while (!shared->ending && shared->threads.size() < shared->most) {
      shared->threads.emplace_back([shared] { shared->help(); });
      pthread_setname_np(shared->threads.back().native_handle(), "flexkv-digest");
    }
  } catch (const std::exception&) {
    // The error is ignored. Threads that have started still help; if there are none, the caller works alone.
  }
}

// Does the work with the crew's help. Returns false, with nothing done, if the caller has to work alone.
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

// Makes the threads return after their current shares. Returns the threads, so that the caller can join or
// detach them. Precondition: the caller does not hold the lock.
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
