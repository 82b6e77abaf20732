// Binds the movers and I/O queues that count calls or inject faults.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>

#include "base/error.h"
#include "bindings/interruptible.h"
#include "bindings/list_argument.h"
#include "testing/bindings/testing_class.h"
#include "testing/counting_mover.h"
#include "testing/faulty_mover.h"
#include "testing/faulty_queue.h"

namespace py = pybind11;

namespace flexkv {
namespace {

FaultRule make_rule(int32_t action, std::optional<int32_t> kind, std::optional<int64_t> nth_op,
                    std::optional<int32_t> page, std::optional<int32_t> layer, std::optional<int32_t> block,
                    std::optional<int32_t> slot, const std::string& reason, double delay_s,
                    int64_t corrupt_bytes, int64_t times) {
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
}

IoFaultRule make_io_rule(int32_t action, std::optional<bool> write, std::optional<int32_t> disk,
                         std::optional<int64_t> nth, std::optional<int64_t> offset, int32_t error,
                         int64_t bytes, int64_t times) {
  if (action < 0 || action > static_cast<int32_t>(IoFaultAction::kStall)) {
    throw ContractError("no I/O fault action " + std::to_string(action));
  }
  IoFaultRule rule;
  rule.action = static_cast<IoFaultAction>(action);
  rule.write = write;
  rule.disk = disk;
  rule.nth = nth;
  rule.offset = offset;
  rule.error = error;
  rule.bytes = bytes;
  rule.times = times;
  return rule;
}

}  // namespace

void bind_movers(py::module_& m) {
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
      .def(py::init(&make_rule), py::arg("action"), py::kw_only(), py::arg("kind") = py::none(),
           py::arg("nth_op") = py::none(), py::arg("page") = py::none(), py::arg("layer") = py::none(),
           py::arg("block") = py::none(), py::arg("slot") = py::none(), py::arg("reason") = "injected fault",
           py::arg("delay_s") = 0.0, py::arg("corrupt_bytes") = 0, py::arg("times") = -1);
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

void bind_io_faults(py::module_& m) {
  NativeBinding<IoFaultRule>(m, "IoFaultRule")
      .def(py::init(&make_io_rule), py::arg("action"), py::kw_only(), py::arg("write") = py::none(),
           py::arg("disk") = py::none(), py::arg("nth") = py::none(), py::arg("offset") = py::none(),
           py::arg("error") = 5, py::arg("bytes") = 0, py::arg("times") = -1);
  NativeBinding<IoFaults, QueueWrapper, std::shared_ptr<IoFaults>>(m, "IoFaults")
      .def(py::init<List<IoFaultRule>>(), py::arg("rules"))
      .def("add", &IoFaults::add, py::arg("rule"))
      .def("release", &IoFaults::release, py::call_guard<py::gil_scoped_release>())
      .def(
          "wait_stalled",
          [](IoFaults& faults, int64_t count, double deadline_s) {
            return wait_interruptibly(deadline_s,
                                      [&](double slice_s) { return faults.wait_stalled(count, slice_s); });
          },
          py::arg("count"), py::arg("deadline_s"))
      .def_property_readonly("acted", &IoFaults::acted);
}

}  // namespace flexkv
