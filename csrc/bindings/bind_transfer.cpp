// The transfer engine and its movers, for Python. Numbers and int32 arrays in, tuples out;
// flexkv/transfer/engine.py gives them their names.
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
#include "bindings/interruptible.h"
#include "bindings/list_argument.h"
#include "bindings/native_class.h"
#include "bindings/text.h"
#include "transfer/counting_mover.h"
#include "transfer/engine.h"
#include "transfer/faulty_mover.h"
#include "transfer/host_mover.h"

namespace py = pybind11;

namespace flexkv {
namespace {

using IdArray = py::array_t<int32_t, py::array::c_style>;

template <typename T>
std::vector<T> copy_of(const py::array_t<T, py::array::c_style>& array) {
  std::vector<T> copy(static_cast<size_t>(array.size()));
  if (!copy.empty()) std::memcpy(copy.data(), array.data(), copy.size() * sizeof(T));  // may be unaligned
  return copy;
}

std::vector<int32_t> to_ids(const py::handle& object, const char* what, int64_t op_id) {
  if (!py::isinstance<IdArray>(object) || py::reinterpret_borrow<py::array>(object).ndim() != 1) {
    const std::string given = py::isinstance<py::array>(object)
                                  ? "an array of " + py::str(object.attr("dtype")).cast<std::string>() +
                                        ", shape " + py::str(object.attr("shape")).cast<std::string>()
                                  : "a " + py::str(py::type::of(object).attr("__name__")).cast<std::string>();
    throw ContractError(std::string(what) + " of op " + std::to_string(op_id) +
                        " must be an int32 C-contiguous array of shape [pages]; given " + given);
  }
  return copy_of(py::reinterpret_borrow<IdArray>(object));
}

IdArray to_array(const std::vector<int32_t>& ids) {
  return IdArray(static_cast<py::ssize_t>(ids.size()), ids.data());
}

// op_id, kind, group, priority, blocks, slots, layerwise, places, tags, digests, reads
constexpr size_t kOpFields = 11;

// What an array of a graph's op must be. Its own check: pybind11's casters would convert or copy it first.
template <typename T>
py::array_t<T, py::array::c_style> op_array(const py::handle& object, int64_t op_id, const char* name,
                                            int dimensions, const std::string& needed) {
  using Array = py::array_t<T, py::array::c_style>;
  if (!py::isinstance<Array>(object) || py::reinterpret_borrow<py::array>(object).ndim() != dimensions) {
    throw ContractError(std::string(name) + " of op " + std::to_string(op_id) + " must be " + needed);
  }
  return py::reinterpret_borrow<Array>(object);
}

std::vector<uint8_t> to_tags(const py::handle& object, int64_t op_id) {
  const std::string needed = "a uint8 C-contiguous array of shape [pages, " + std::to_string(kTagBytes) + "]";
  const auto tags = op_array<uint8_t>(object, op_id, "tags", 2, needed);
  if (tags.shape(1) != static_cast<py::ssize_t>(kTagBytes)) {
    throw ContractError("tags of op " + std::to_string(op_id) + " must be " + needed);
  }
  return copy_of(tags);
}

std::vector<uint64_t> to_digests(const py::handle& object, int64_t op_id) {
  return copy_of(
      op_array<uint64_t>(object, op_id, "digests", 2, "a uint64 C-contiguous array of shape [pages, runs]"));
}

std::vector<int64_t> to_reads(const py::handle& object, int64_t op_id) {
  return copy_of(
      op_array<int64_t>(object, op_id, "reads", 1, "an int64 C-contiguous array of shape [pages]"));
}

// [pages, runs]; no pages where the op made no digests.
py::array_t<uint64_t> from_digests(const std::vector<uint64_t>& digests, size_t runs) {
  const auto pages = static_cast<py::ssize_t>(runs == 0 ? 0 : digests.size() / runs);
  return py::array_t<uint64_t>({pages, static_cast<py::ssize_t>(runs)}, digests.data());
}

// Of each failed page.
py::array_t<uint8_t> from_blames(const std::vector<Blame>& blames) {
  static_assert(sizeof(Blame) == 1);
  const auto count = static_cast<py::ssize_t>(blames.size());
  return py::array_t<uint8_t>(count, reinterpret_cast<const uint8_t*>(blames.data()));
}

OpSpec to_op(const py::object& op) {
  if (!py::isinstance<py::tuple>(op)) {
    throw ContractError("an op is a tuple of " + std::to_string(kOpFields) + " fields, given a " +
                        Py_TYPE(op.ptr())->tp_name);
  }
  const auto fields = py::reinterpret_borrow<py::tuple>(op);
  if (fields.size() != kOpFields) {
    throw ContractError("an op has " + std::to_string(kOpFields) + " fields, given " +
                        std::to_string(fields.size()));
  }
  OpSpec spec;
  spec.op_id = fields[0].cast<int64_t>();
  spec.kind = static_cast<OpKind>(fields[1].cast<int32_t>());
  spec.group = fields[2].cast<int32_t>();
  spec.priority = static_cast<Priority>(fields[3].cast<int32_t>());
  spec.blocks = to_ids(fields[4], "blocks", spec.op_id);
  spec.slots = to_ids(fields[5], "slots", spec.op_id);
  spec.layerwise = fields[6].cast<bool>();
  spec.places = to_ids(fields[7], "places", spec.op_id);
  spec.tags = to_tags(fields[8], spec.op_id);
  spec.digests = to_digests(fields[9], spec.op_id);
  spec.reads = to_reads(fields[10], spec.op_id);
  return spec;
}

GraphSpec to_graph(const py::sequence& ops, const py::sequence& edges) try {
  GraphSpec graph;
  visit_items(ops, [&](const py::object& op) {
    graph.ops.push_back(to_op(op));
    return true;
  });
  visit_items(edges, [&](const py::object& edge) {
    const auto [before, after, kind] = py::cast<std::tuple<int32_t, int32_t, int32_t>>(edge);
    graph.edges.push_back({before, after, static_cast<EdgeKind>(kind)});
    return true;
  });
  return graph;
} catch (const py::cast_error&) {
  throw ContractError("a graph's numbers must be integers: op_id of 64 bits, all others of 32");
}

std::optional<int64_t> submit(TransferEngine& engine, const py::sequence& ops, const py::sequence& edges,
                              std::optional<StreamId> stream, bool gated) {
  GraphSpec graph = to_graph(ops, edges);
  graph.gated = gated;
  const py::gil_scoped_release release;
  return engine.submit(std::move(graph), stream);
}

py::list poll(TransferEngine& engine, size_t max_results) {
  std::vector<OpResult> results;
  {
    const py::gil_scoped_release release;
    results = engine.poll(max_results);
  }
  py::list list;
  for (const OpResult& r : results) {
    list.append(py::make_tuple(r.op_id, r.ticket, static_cast<int32_t>(r.status), to_array(r.failed),
                               to_text(r.reason), from_digests(r.digests, r.digest_runs),
                               from_blames(r.blames)));
  }
  return list;
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

// Destroying an engine waits for its threads: not with the GIL held.
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
  NativeBinding<CountingMover, PageMover, std::shared_ptr<CountingMover>>(m, "CountingMover")
      .def(py::init<std::shared_ptr<PageMover>>(), py::arg("inner"))
      .def(
          "count",
          [](const CountingMover& mover, int32_t kind) {
            if (kind < 0 || kind >= kOpKinds) throw ContractError("no op kind " + std::to_string(kind));
            const MoveCount c = mover.count(static_cast<OpKind>(kind));
            return py::make_tuple(c.moves, c.failed, c.bytes, c.busy_s);
          },
          py::arg("kind"));
  NativeBinding<FaultRule>(m, "FaultRule")
      .def(py::init([](int32_t action, std::optional<int32_t> kind, std::optional<int64_t> nth_op,
                       std::optional<int32_t> page, std::optional<int32_t> layer,
                       std::optional<int32_t> block, std::optional<int32_t> slot, const std::string& reason,
                       double delay_s, int64_t corrupt_bytes, int64_t times) {
             if (action < 0 || action > static_cast<int32_t>(FaultAction::kCorrupt)) {
               throw ContractError("no fault action " + std::to_string(action));
             }
             FaultRule rule;
             rule.action = static_cast<FaultAction>(action);
             if (kind) rule.kind = static_cast<OpKind>(*kind);
             rule.nth_op = nth_op;
             rule.page = page;
             rule.layer = layer;
             rule.block = block;
             rule.slot = slot;
             rule.reason = reason;
             rule.delay_s = delay_s;
             rule.corrupt_bytes = corrupt_bytes;
             rule.times = times;
             return rule;
           }),
           py::arg("action"), py::kw_only(), py::arg("kind") = py::none(), py::arg("nth_op") = py::none(),
           py::arg("page") = py::none(), py::arg("layer") = py::none(), py::arg("block") = py::none(),
           py::arg("slot") = py::none(), py::arg("reason") = "injected fault", py::arg("delay_s") = 0.0,
           py::arg("corrupt_bytes") = 0, py::arg("times") = -1);
  NativeBinding<FaultyMover, PageMover, std::shared_ptr<FaultyMover>>(m, "FaultyMover")
      .def(py::init<std::shared_ptr<PageMover>, List<FaultRule>>(), py::arg("inner"), py::arg("rules"))
      .def("release", &FaultyMover::release, py::call_guard<py::gil_scoped_release>())
      .def(
          "wait_stalled",
          [](FaultyMover& mover, int64_t count, double deadline_s) {
            return wait_interruptibly(deadline_s,
                                      [&](double slice_s) { return mover.wait_stalled(count, slice_s); });
          },
          py::arg("count"), py::arg("deadline_s"))
      .def_property_readonly("calls", &FaultyMover::calls)
      .def_property_readonly("acted", &FaultyMover::acted)
      .def_property_readonly("stalled", &FaultyMover::stalled);
}

}  // namespace

void bind_transfer(py::module_& m) {
  bind_movers(m);
  NativeBinding<Lane, std::shared_ptr<Lane>>(m, "Lane");
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
           py::arg("gated") = false)
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
