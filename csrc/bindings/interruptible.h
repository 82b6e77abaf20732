// Functions that wait and that a signal can interrupt, so that Ctrl-C reaches Python while the native core
// sleeps.
#pragma once
#include <pybind11/pybind11.h>

#include <algorithm>

#include "transfer/deadline.h"

namespace flexkv {

// Unit: seconds. The maximum time between the arrival of a signal and the call of its handler.
inline constexpr double kSignalLookS = 0.1;

// Calls `wait(seconds)` without the GIL, in slices of at most kSignalLookS, until it returns true, or until
// `deadline_s` seconds have passed. Returns whether `wait` returned true. Throws the exception that a signal
// handler raised. Precondition: the GIL is held.
template <typename Wait>
bool wait_interruptibly(double deadline_s, Wait wait) {
  const auto deadline = deadline_in(deadline_s);
  for (;;) {
    const double left_s = std::max(0.0, seconds_until(deadline));
    {
      const pybind11::gil_scoped_release release;
      if (wait(std::min(left_s, kSignalLookS))) return true;
    }
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
    if (left_s <= kSignalLookS) return false;
  }
}

// Calls `work` without the GIL and returns its result. So other Python threads can run in the meantime, and
// `work` may wait for a lock whose owner needs the GIL. Precondition: the GIL is held.
template <typename Work>
auto without_gil(Work work) {
  const pybind11::gil_scoped_release release;
  return work();
}

// Returns a shared_ptr to the object of `inner`. The object is destroyed without the GIL, because destroying
// the object may have to join threads.
template <typename T>
std::shared_ptr<T> released_without_gil(std::shared_ptr<T> inner) {
  T* object = inner.get();
  return {object, [inner = std::move(inner)](T*) mutable {
            if (PyGILState_Check() != 0) {
              const pybind11::gil_scoped_release release;
              inner.reset();
            } else {
              inner.reset();
            }
          }};
}

}  // namespace flexkv
