// Binds views of pools, slot images, copies in host memory, digests and page conversions.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "base/digest.h"
#include "base/error.h"
#include "bindings/aligned_array.h"
#include "bindings/bindings.h"
#include "bindings/byte_buffer.h"
#include "bindings/list_argument.h"
#include "bindings/native_class.h"
#include "layout/kv_view.h"
#include "layout/page_conversion.h"
#include "layout/page_digest.h"
#include "layout/slot_image.h"
#include "transfer/host_copy.h"

namespace py = pybind11;

namespace flexkv {
namespace {

constexpr int kColumns = 5;  // the columns of a RunArray: base, block_stride, run_bytes, page_offset, layer
using RunArray = py::array_t<int64_t, py::array::c_style>;

std::vector<Segment> to_segments(const RunArray& rows) {
  if (rows.ndim() != 2 || rows.shape(1) != kColumns) {
    throw GeometryError(
        "runs must be int64 of shape [n, 5] (base, block_stride, run_bytes, page_offset, layer)");
  }
  require_aligned<GeometryError>(rows, "runs");
  const auto at = rows.unchecked<2>();
  std::vector<Segment> segments;
  segments.reserve(static_cast<size_t>(at.shape(0)));
  for (py::ssize_t i = 0; i < at.shape(0); ++i) {
    if (at(i, 4) < 0 || at(i, 4) > INT32_MAX) throw GeometryError("layer " + std::to_string(at(i, 4)));
    segments.push_back(
        {static_cast<uintptr_t>(at(i, 0)), at(i, 1), at(i, 2), at(i, 3), static_cast<int32_t>(at(i, 4))});
  }
  return segments;
}

RunArray to_rows(const std::vector<Segment>& segments) {
  RunArray rows({static_cast<py::ssize_t>(segments.size()), static_cast<py::ssize_t>(kColumns)});
  auto at = rows.mutable_unchecked<2>();
  for (size_t i = 0; i < segments.size(); ++i) {
    const Segment& s = segments[i];
    const auto row = static_cast<py::ssize_t>(i);
    at(row, 0) = static_cast<int64_t>(s.base);
    at(row, 1) = s.block_stride;
    at(row, 2) = s.run_bytes;
    at(row, 3) = s.page_offset;
    at(row, 4) = s.layer;
  }
  return rows;
}

std::string describe(const KvView& view) {
  return "KvView(" + std::to_string(view.runs().size()) + " runs in " +
         std::to_string(view.segments().size()) + " segments, " + std::to_string(view.num_layers()) +
         " layers, blocks [" + std::to_string(view.first_block()) + ", " + std::to_string(view.num_blocks()) +
         "), stripe of " + std::to_string(view.stripe_bytes()) + " bytes)";
}

void bind_view(py::module_& m) {
  // A shared_ptr owns the view, because the transfer engine keeps the view for as long as an op may use it.
  NativeBinding<KvView, std::shared_ptr<KvView>>(m, "KvView")
      .def(py::init([](const RunArray& runs, int64_t num_blocks, int64_t stripe_bytes, int64_t first_block) {
             std::vector<Segment> segments = to_segments(runs);
             const py::gil_scoped_release release;
             return std::make_shared<KvView>(std::move(segments), num_blocks, stripe_bytes, first_block);
           }),
           py::arg("runs").noconvert(), py::arg("num_blocks"), py::arg("stripe_bytes"),
           py::arg("first_block") = 0)
      .def_property_readonly("runs", [](const KvView& v) { return to_rows(v.runs()); })
      .def_property_readonly("segments", [](const KvView& v) { return to_rows(v.segments()); })
      .def(
          "segments_of_layers",
          [](const KvView& v, int32_t lo, int32_t hi) { return to_rows(v.segments_of_layers(lo, hi)); },
          py::arg("lo"), py::arg("hi"))
      .def_property_readonly("num_layers", &KvView::num_layers)
      .def_property_readonly("num_blocks", &KvView::num_blocks)
      .def_property_readonly("first_block", &KvView::first_block)
      .def_property_readonly("stripe_bytes", &KvView::stripe_bytes)
      .def("check", &KvView::check, py::call_guard<py::gil_scoped_release>())
      .def("__repr__", &describe);
}

void bind_slot_image(py::module_& m) {
  NativeBinding<SlotImage>(m, "SlotImage")
      .def(py::init<List<int64_t>, int64_t>(), py::arg("stripe_bytes"), py::arg("trailer_bytes") = 0)
      .def("stripe_offset", &SlotImage::stripe_offset, py::arg("rank"))
      .def("stripe_bytes", &SlotImage::stripe_bytes, py::arg("rank"))
      .def_property_readonly("ranks", &SlotImage::ranks)
      .def_property_readonly("trailer_offset", &SlotImage::trailer_offset)
      .def_property_readonly("trailer_bytes", &SlotImage::trailer_bytes)
      .def_property_readonly("total_bytes", &SlotImage::total_bytes)
      // py::is_operator makes the result NotImplemented, instead of an error, if the second object has a
      // different class.
      .def("__eq__", [](const SlotImage& a, const SlotImage& b) { return a == b; }, py::is_operator());
}

void require_stripe(const KvView& view, size_t bytes) {
  if (static_cast<int64_t>(bytes) == view.stripe_bytes()) return;
  throw GeometryError("the buffer has " + std::to_string(bytes) + " bytes: the stripe has " +
                      std::to_string(view.stripe_bytes()));
}

void bind_host_copy(py::module_& m) {
  m.def(
      "gather",
      [](const KvView& view, int64_t block, const py::buffer& stripe) {
        const ByteBuffer bytes(stripe, ByteBuffer::kWritable);
        require_stripe(view, bytes.size());
        py::gil_scoped_release release;
        gather(view, block, bytes.data());
      },
      py::arg("view"), py::arg("block"), py::arg("stripe"));
  m.def(
      "scatter",
      [](const KvView& view, int64_t block, const py::buffer& stripe) {
        const ByteBuffer bytes(stripe, ByteBuffer::kReadable);
        require_stripe(view, bytes.size());
        py::gil_scoped_release release;
        scatter(view, block, bytes.data());
      },
      py::arg("view"), py::arg("block"), py::arg("stripe"));
  m.def(
      "gather_layers",
      [](const KvView& view, int32_t lo, int32_t hi, int64_t block, const py::buffer& stripe) {
        const ByteBuffer bytes(stripe, ByteBuffer::kWritable);
        require_stripe(view, bytes.size());
        py::gil_scoped_release release;
        gather_layers(view, view.segments_of_layers(lo, hi), block, bytes.data());
      },
      py::arg("view"), py::arg("lo"), py::arg("hi"), py::arg("block"), py::arg("stripe"));
  m.def(
      "scatter_layers",
      [](const KvView& view, int32_t lo, int32_t hi, int64_t block, const py::buffer& stripe) {
        const ByteBuffer bytes(stripe, ByteBuffer::kReadable);
        require_stripe(view, bytes.size());
        py::gil_scoped_release release;
        scatter_layers(view, view.segments_of_layers(lo, hi), block, bytes.data());
      },
      py::arg("view"), py::arg("lo"), py::arg("hi"), py::arg("block"), py::arg("stripe"));
}

void bind_digest(py::module_& m) {
  m.def(
      "run_digest",
      [](const py::buffer& run) {
        const ByteBuffer bytes(run, ByteBuffer::kReadable);
        py::gil_scoped_release release;
        return run_digest(bytes.data(), bytes.size());
      },
      py::arg("run"));
  m.def(
      "page_digests",
      [](const KvView& view, const py::buffer& stripe) {
        const ByteBuffer bytes(stripe, ByteBuffer::kReadable);
        require_stripe(view, bytes.size());
        std::vector<uint64_t> digests;
        {
          py::gil_scoped_release release;
          digests = page_digests(view, bytes.data());
        }
        return py::array_t<uint64_t>(static_cast<py::ssize_t>(digests.size()), digests.data());
      },
      py::arg("view"), py::arg("stripe"));
}

// The types of arguments that describe an order of elements. They are tuples and not std::arrays: for a
// std::array, pybind11 would accept a sequence that yields fewer items than its length promises.
using AxisTuple = std::tuple<int64_t, int64_t, int64_t, int64_t>;
using OrderTuple = std::tuple<AxisTuple, AxisTuple, int64_t>;

std::array<int64_t, kRowAxes> axes_of(const AxisTuple& axes) {
  return {std::get<0>(axes), std::get<1>(axes), std::get<2>(axes), std::get<3>(axes)};
}

RowOrder order_of(const OrderTuple& order) {
  return {axes_of(std::get<0>(order)), axes_of(std::get<1>(order)), std::get<2>(order)};
}

void bind_conversion(py::module_& m) {
  NativeBinding<PageConversion>(m, "PageConversion")
      .def(py::init([](const AxisTuple& counts, int64_t element_bytes, const OrderTuple& source,
                       const OrderTuple& target) {
             const py::gil_scoped_release release;
             return std::make_unique<PageConversion>(axes_of(counts), element_bytes, order_of(source),
                                                     order_of(target));
           }),
           py::arg("counts"), py::arg("element_bytes"), py::arg("source"), py::arg("target"))
      .def_property_readonly("stripe_bytes", &PageConversion::stripe_bytes)
      .def(
          "convert",
          [](const PageConversion& conversion, const py::buffer& source, const py::buffer& target) {
            const ByteBuffer from(source, ByteBuffer::kReadable);
            const ByteBuffer to(target, ByteBuffer::kWritable);
            for (const size_t bytes : {from.size(), to.size()}) {
              if (static_cast<int64_t>(bytes) != conversion.stripe_bytes()) {
                throw GeometryError("the buffer has " + std::to_string(bytes) + " bytes: the stripe has " +
                                    std::to_string(conversion.stripe_bytes()));
              }
            }
            if (from.data() < to.data() + to.size() && to.data() < from.data() + from.size()) {
              throw GeometryError("source and target share bytes: a page is not converted in place");
            }
            py::gil_scoped_release release;
            conversion.convert(from.data(), to.data());
          },
          py::arg("source"), py::arg("target"));
}

}  // namespace

void bind_layout(py::module_& m) {
  bind_view(m);
  bind_slot_image(m);
  bind_host_copy(m);
  bind_digest(m);
  bind_conversion(m);
}

}  // namespace flexkv
