#include "gds/page_io.h"

#include <exception>
#include <span>
#include <utility>
#include <vector>

namespace flexkv {
namespace {

std::string describe(const IoCall& call, const IoOutcome& outcome) {
  return std::string(call.write ? "write" : "read") + " of " + std::to_string(call.bytes) +
         " bytes at offset " + std::to_string(call.offset) + " of file " + std::to_string(call.file) +
         " on device " + std::to_string(call.device) + ": " +
         (outcome.error.empty() ? "short, " + std::to_string(outcome.bytes) + " bytes moved" : outcome.error);
}

// Adds one call's outcome to `result`. Returns false if the call failed; the page then fails, too.
bool take_outcome(const FileIo& io, const IoCall& call, const IoOutcome& outcome, PageIoResult& result) {
  result.calls += 1;
  const IoRoute route = outcome.route.value_or(io.route(call));
  if (route == IoRoute::kBounced) result.bounced += 1;
  if (route == IoRoute::kUnknown) result.unknown += 1;
  result.bytes += outcome.bytes;
  if (outcome.error.empty() && outcome.bytes == call.bytes) return true;
  result.error = describe(call, outcome);
  result.cause = outcome.of_memory       ? StagedFailure::kDevice
                 : outcome.error.empty() ? StagedFailure::kShort
                                         : StagedFailure::kIo;
  return false;
}

void carry_out(FileIo& io, const PageJob& job, PageIoResult& result) {
  const std::span<const IoCall> calls = job.calls;
  const auto together = calls.first(job.together);
  std::vector<IoOutcome> outcomes(together.size());
  io.transfer_all(together, outcomes);
  for (size_t i = 0; i < together.size(); ++i) {
    if (!take_outcome(io, together[i], outcomes[i], result)) return;
  }
  for (const IoCall& call : calls.subspan(job.together)) {
    if (!take_outcome(io, call, io.transfer(call), result)) return;
  }
}

}  // namespace

void PageIo::submit(int32_t position, PageJob job) {
  const int32_t disk = job.calls.front().device;
  auto task = [io = parts_.io, shared = shared_, position,
               job = std::make_shared<PageJob>(std::move(job))](const std::string& not_started) mutable {
    PageIoResult result;
    result.position = position;
    result.error = not_started;
    result.cause = StagedFailure::kDevice;
    try {
      if (not_started.empty()) carry_out(*io, *job, result);
    } catch (const std::exception& error) {
      result.error = error.what();
      result.cause = StagedFailure::kDevice;
    }
    // Frees the job before its result is visible, because a finished page must hold no references.
    job.reset();
    const std::lock_guard lock(shared->mutex);
    shared->ended.push_back(std::move(result));
    shared->changed.notify_one();
  };
  parts_.threads->submit(disk, std::move(task));
  in_flight_ += 1;
}

std::deque<PageIoResult> PageIo::take_ended(double wait_s) {
  std::unique_lock lock(shared_->mutex);
  if (wait_s > 0) {
    shared_->changed.wait_until(lock, deadline_in(wait_s), [&] { return !shared_->ended.empty(); });
  }
  std::deque<PageIoResult> ended;
  ended.swap(shared_->ended);
  in_flight_ -= static_cast<int32_t>(ended.size());
  return ended;
}

}  // namespace flexkv
