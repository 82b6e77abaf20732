// Binds the transfer engine and its movers.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "bindings/bindings.h"
#include "bindings/graph_reader.h"
#include "bindings/interruptible.h"
#include "bindings/list_argument.h"
#include "bindings/native_class.h"
#include "bindings/text.h"
#include "transfer/engine.h"
#include "transfer/host_mover.h"

namespace py = pybind11;

namespace flexkv {

// A recorded point in a stream. The only use of this object in Python is to pass it to submit().
struct StreamPoint {
  std::shared_ptr<StreamEvent> event;
};

namespace {

using IdArray = py::array_t<int32_t, py::array::c_style>;

IdArray to_array(const std::vector<int32_t>& ids) {
  return IdArray(static_cast<py::ssize_t>(ids.size()), ids.data());
}

// Returns an op's digests as an array [pages, runs]. If the op computed no digests, the array has 0 pages.
py::array_t<uint64_t> from_digests(const std::vector<uint64_t>& digests, size_t runs) {
  const auto pages = static_cast<py::ssize_t>(runs == 0 ? 0 : digests.size() / runs);
  return py::array_t<uint64_t>({pages, static_cast<py::ssize_t>(runs)}, digests.data());
}

// Returns the failure causes of an op as an array with one element for each failed page.
py::array_t<uint8_t> from_causes(const std::vector<FailureCause>& causes) {
  static_assert(sizeof(FailureCause) == 1);
  const auto count = static_cast<py::ssize_t>(causes.size());
  return py::array_t<uint8_t>(count, reinterpret_cast<const uint8_t*>(causes.data()));
}

std::optional<int64_t> submit(TransferEngine& engine, const py::sequence& ops, const py::sequence& edges,
                              std::optional<StreamId> stream, bool gated,
                              const std::optional<std::shared_ptr<StreamPoint>>& after) {
  GraphSpec graph = read_graph(ops, edges);
  graph.gated = gated;
  if (after) graph.fence = (*after)->event;
  const py::gil_scoped_release release;
  return engine.submit(std::move(graph), stream);
}

std::vector<OpResult> poll(TransferEngine& engine, size_t max_results) {
  // The inference engine polls in each of its steps, and usually no op has finished. has_results() takes no
  // lock and does not release the GIL. So if no op has finished, the step waits neither for a lane's thread
  // nor for another Python thread.
  if (!engine.has_results()) return {};
  const py::gil_scoped_release release;
  return engine.poll(max_results);
}

void bind_results(py::module_& m) {
  NativeBinding<OpResult>(m, "OpResult")
      .def_readonly("op_id", &OpResult::op_id)
      .def_readonly("ticket", &OpResult::ticket)
      .def_property_readonly("status", [](const OpResult& r) { return static_cast<int32_t>(r.status); })
      .def_property_readonly("failed", [](const OpResult& r) { return to_array(r.failed); })
      .def_property_readonly("reason", [](const OpResult& r) { return to_text(r.reason); })
      .def_property_readonly("digests",
                             [](const OpResult& r) { return from_digests(r.digests, r.digest_runs); })
      .def_property_readonly("causes", [](const OpResult& r) { return from_causes(r.causes); });
}

py::tuple wait_layer(TransferEngine& engine, int64_t ticket, int32_t layer, double deadline_s,
                     std::optional<StreamId> stream) {
  LayerWait answer;
  wait_interruptibly(deadline_s, [&](double slice_s) {
    answer = stream ? engine.wait_layer_on(ticket, layer, slice_s, *stream)
                    : engine.wait_layer(ticket, layer, slice_s);
    return answer.in_time;
  });
  py::list failed;
  for (const auto& [op_id, pages] : answer.failed) failed.append(py::make_tuple(op_id, to_array(pages)));
  return py::make_tuple(answer.in_time, failed);
}

py::list lanes(const TransferEngine& engine) {
  std::vector<LaneState> states;
  {
    const py::gil_scoped_release release;
    states = engine.lanes();
  }
  py::list list;
  for (const LaneState& s : states) {
    list.append(py::make_tuple(static_cast<int32_t>(s.kind), s.lane, s.up, to_text(s.reason), s.open_ops,
                               s.held_places, py::cast(s.stuck), s.times_down));
  }
  return list;
}

// Makes a transfer engine whose destructor runs without the GIL, because the destructor waits for the
// engine's threads.
std::shared_ptr<TransferEngine> make_engine(std::optional<std::shared_ptr<PageMover>> mover,
                                            int32_t queue_ops, int32_t copy_threads, double op_stuck_s,
                                            List<std::shared_ptr<Lane>> lanes) {
  if (!mover) mover = std::make_shared<HostMover>();
  const EngineOptions options{queue_ops, copy_threads, op_stuck_s};
  return {new TransferEngine(std::move(*mover), options, std::move(lanes)), [](TransferEngine* engine) {
            const py::gil_scoped_release release;
            delete engine;
          }};
}

void bind_movers(py::module_& m) {
  NativeBinding<PageMover, std::shared_ptr<PageMover>>(m, "PageMover");
  NativeBinding<HostMover, PageMover, std::shared_ptr<HostMover>>(m, "HostMover").def(py::init<>());
}

}  // namespace

void bind_transfer(py::module_& m) {
  bind_movers(m);
  bind_results(m);
  NativeBinding<Lane, std::shared_ptr<Lane>>(m, "Lane");
  NativeBinding<StreamPoint, std::shared_ptr<StreamPoint>>(m, "StreamPoint");
  NativeBinding<TransferEngine, std::shared_ptr<TransferEngine>>(m, "TransferEngine")
      .def(py::init(&make_engine), py::arg("mover"), py::arg("queue_ops"), py::arg("copy_threads"),
           py::arg("op_stuck_s"), py::arg("lanes"))
      .def(
          "attach_view",
          [](TransferEngine& engine, int32_t group, std::shared_ptr<KvView> view,
             std::shared_ptr<HostPool> pool, int64_t stripe_offset, int64_t digest_offset) {
            const py::gil_scoped_release release;
            engine.attach_view(group, std::move(view), std::move(pool), stripe_offset, digest_offset);
          },
          py::arg("group"), py::arg("view"), py::arg("pool"), py::arg("stripe_offset"),
          py::arg("digest_offset"))
      .def("detach_view", &TransferEngine::detach_view, py::arg("group"),
           py::call_guard<py::gil_scoped_release>())
      .def("released_views", &TransferEngine::released_views, py::call_guard<py::gil_scoped_release>())
      .def("submit", &submit, py::arg("ops"), py::arg("edges"), py::arg("stream") = py::none(),
           py::arg("gated") = false, py::arg("after") = py::none())
      .def(
          "record",
          [](TransferEngine& engine, StreamId stream) {
            return released_without_gil(std::make_shared<StreamPoint>(StreamPoint{engine.record(stream)}));
          },
          py::arg("stream"), py::call_guard<py::gil_scoped_release>())
      .def(
          "order_after",
          [](TransferEngine& engine, int64_t ticket, double deadline_s, std::optional<StreamId> stream) {
            TransferEngine::Ordered ordered;
            wait_interruptibly(deadline_s, [&](double slice_s) {
              ordered = engine.order_after(ticket, slice_s, stream);
              return ordered || ordered.behind_forward;
            });
            return ordered.in_time;
          },
          py::arg("ticket"), py::arg("deadline_s"), py::arg("stream") = py::none())
      .def(
          "open_layers",
          [](TransferEngine& engine, const List<int64_t>& tickets, int32_t layers,
             std::optional<StreamId> stream) { engine.open_layers(tickets, layers, stream); },
          py::arg("tickets"), py::arg("layers"), py::arg("stream") = py::none(),
          py::call_guard<py::gil_scoped_release>())
      .def("poll", &poll, py::arg("max_results"))
      .def_property_readonly("event_fd", &TransferEngine::event_fd)
      .def(
          "wait",
          [](TransferEngine& engine, int64_t ticket, double deadline_s) {
            return wait_interruptibly(deadline_s,
                                      [&](double slice_s) { return engine.wait(ticket, slice_s); });
          },
          py::arg("ticket"), py::arg("deadline_s"))
      .def("wait_layer", &wait_layer, py::arg("ticket"), py::arg("layer"), py::arg("deadline_s"),
           py::arg("stream") = py::none())
      .def("cancel", &TransferEngine::cancel, py::arg("ticket"), py::call_guard<py::gil_scoped_release>())
      .def("lanes", &lanes)
      .def(
          "close",
          [](TransferEngine& engine, double deadline_s) {
            return wait_interruptibly(deadline_s, [&](double slice_s) { return engine.close(slice_s); });
          },
          py::arg("deadline_s"));
}

}  // namespace flexkv
