// Binds the classes of the disk tier: page codecs, open slabs and the disk lane.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "bindings/aligned_array.h"
#include "bindings/bindings.h"
#include "bindings/byte_buffer.h"
#include "bindings/count_dicts.h"
#include "bindings/interruptible.h"
#include "bindings/io_backend_name.h"
#include "bindings/list_argument.h"
#include "bindings/native_class.h"
#include "bindings/text.h"
#include "storage/disk_lane.h"
#include "storage/page_codec.h"
#include "storage/slab_file.h"

namespace py = pybind11;

namespace flexkv {
namespace {

using RunArray = py::array_t<int64_t, py::array::c_style>;

std::vector<PageRun> to_runs(const RunArray& rows) {
  if (rows.ndim() != 2 || rows.shape(1) != 3) {
    throw GeometryError("runs must be int64 of shape [n, 3] (offset, bytes, layer)");
  }
  require_aligned<GeometryError>(rows, "runs");
  std::vector<PageRun> runs;
  const auto at = rows.unchecked<2>();
  for (py::ssize_t i = 0; i < at.shape(0); ++i) {
    if (at(i, 2) < 0 || at(i, 2) > INT32_MAX) throw GeometryError("layer " + std::to_string(at(i, 2)));
    runs.push_back({at(i, 0), at(i, 1), static_cast<int32_t>(at(i, 2))});
  }
  return runs;
}

// Deletes a slab whose last owner may be Python. Releases the GIL if this thread holds it: closing the file
// waits if the file's server does not answer, and this must not delay all Python threads.
struct CloseWithoutGil {
  void operator()(SlabFile* slab) const {
    // A lane's own thread does not hold the GIL. After the interpreter has ended, there is no GIL.
    if (Py_IsInitialized() == 0 || PyGILState_Check() == 0) {
      delete slab;
      return;
    }
    const py::gil_scoped_release release;
    delete slab;
  }
};

std::shared_ptr<PageCodec> make_codec(List<int64_t> stripe_bytes, const List<RunArray>& runs,
                                      bool host_digests, uint32_t group) {
  std::vector<std::vector<PageRun>> of_ranks;
  for (const RunArray& rows : runs) of_ranks.push_back(to_runs(rows));
  return std::make_shared<PageCodec>(std::move(stripe_bytes), of_ranks, host_digests, group);
}

void require_image(const PageCodec& codec, const ByteBuffer& buffer) {
  if (static_cast<int64_t>(buffer.size()) == codec.image_bytes()) return;
  throw GeometryError("a slot image has " + std::to_string(codec.image_bytes()) + " bytes, given " +
                      std::to_string(buffer.size()));
}

std::optional<PageTag> to_tag(const std::optional<py::bytes>& bytes) {
  if (!bytes) return std::nullopt;
  const std::string text = *bytes;
  if (text.size() != kTagBytes) {
    throw ContractError("a tag has " + std::to_string(kTagBytes) + " bytes, given " +
                        std::to_string(text.size()));
  }
  return PageTag::read(reinterpret_cast<const uint8_t*>(text.data()));
}

void seal(const PageCodec& codec, const py::buffer& image, uint64_t slab_id, uint64_t slot,
          const py::bytes& tag, uint64_t written) {
  const ByteBuffer bytes(image, ByteBuffer::kWritable);
  require_image(codec, bytes);
  const PageTag fields = *to_tag(tag);
  const py::gil_scoped_release release;
  codec.seal(bytes.data(), {slab_id, slot}, fields, written);
}

// Throws GeometryError if the buffer is too small for a page's stripes or, if the codec uses host digests,
// for the page's complete image.
void require_stripes(const PageCodec& codec, const ByteBuffer& buffer) {
  const int64_t needed = codec.host_digests() ? codec.image_bytes() : codec.image().trailer_offset();
  if (static_cast<int64_t>(buffer.size()) >= needed) return;
  throw GeometryError("a page's stripes take " + std::to_string(needed) + " bytes, given " +
                      std::to_string(buffer.size()));
}

void require_trailer(const PageCodec& codec, const ByteBuffer& buffer) {
  if (static_cast<int64_t>(buffer.size()) == codec.image().trailer_bytes()) return;
  throw GeometryError("a trailer has " + std::to_string(codec.image().trailer_bytes()) + " bytes, given " +
                      std::to_string(buffer.size()));
}

void seal_apart(const PageCodec& codec, const py::buffer& image, const py::buffer& trailer, uint64_t slab_id,
                uint64_t slot, const py::bytes& tag, uint64_t written) {
  const ByteBuffer bytes(image, ByteBuffer::kReadable);
  const ByteBuffer apart(trailer, ByteBuffer::kWritable);
  require_stripes(codec, bytes);
  require_trailer(codec, apart);
  const PageTag fields = *to_tag(tag);
  const py::gil_scoped_release release;
  codec.seal_apart(bytes.data(), apart.data(), {slab_id, slot}, fields, written);
}

py::tuple check_apart(const PageCodec& codec, const py::buffer& image, const py::buffer& trailer,
                      uint64_t slab_id, uint64_t slot, const std::optional<py::bytes>& tag, uint64_t now) {
  const ByteBuffer bytes(image, ByteBuffer::kWritable);
  const ByteBuffer apart(trailer, ByteBuffer::kReadable);
  require_stripes(codec, bytes);
  require_trailer(codec, apart);
  const std::optional<PageTag> wanted = to_tag(tag);
  PageCheck found;
  {
    const py::gil_scoped_release release;
    found = codec.check_apart(bytes.data(), apart.data(), {slab_id, slot}, wanted, now);
  }
  return py::make_tuple(kMissNames[static_cast<size_t>(found.miss)], found.reason);
}

py::tuple check(const PageCodec& codec, const py::buffer& image, uint64_t slab_id, uint64_t slot,
                const std::optional<py::bytes>& tag, uint64_t now, bool data) {
  const ByteBuffer bytes(image, ByteBuffer::kReadable);
  require_image(codec, bytes);
  const std::optional<PageTag> wanted = to_tag(tag);
  PageCheck found;
  {
    const py::gil_scoped_release release;
    found = codec.check_trailer(bytes.data(), {slab_id, slot}, wanted, now);
    if (data && found.miss == PageMiss::kNone) found = codec.check_runs(bytes.data());
  }
  return py::make_tuple(kMissNames[static_cast<size_t>(found.miss)], found.reason);
}

py::tuple trailer(const PageCodec& codec, const py::buffer& image) {
  const ByteBuffer bytes(image, ByteBuffer::kReadable);
  require_image(codec, bytes);
  const PageTrailer head = PageCodec::trailer_of(bytes.data() + codec.image().trailer_offset());
  const py::bytes tag(reinterpret_cast<const char*>(&head.tag), sizeof(head.tag));
  return py::make_tuple(head.slab_id, head.slot, tag, head.written);
}

std::shared_ptr<DiskLane> make_disk_lane(const List<std::shared_ptr<PageCodec>>& codecs,
                                         const List<std::shared_ptr<HostPool>>& pools,
                                         const List<List<std::shared_ptr<SlabFile>>>& slabs,
                                         const std::string& io, int32_t depth, double stuck_s,
                                         const std::optional<std::shared_ptr<QueueWrapper>>& wrapper,
                                         bool zero_fill, bool register_buffers) {
  if (codecs.size() != pools.size()) {
    throw ContractError(std::to_string(codecs.size()) + " groups with " + std::to_string(pools.size()) +
                        " host pools");
  }
  std::vector<DiskGroup> groups;
  for (size_t g = 0; g < codecs.size(); ++g) groups.push_back({codecs[g], {}, pools[g]});
  WrapQueue wrap;
  if (wrapper) {
    wrap = [shared = *wrapper](std::unique_ptr<IoQueue> queue, int32_t disk) {
      return shared->wrap(std::move(queue), disk);
    };
  }
  const DiskOptions options{to_io_backend(io), depth, stuck_s, register_buffers, zero_fill};
  std::vector<std::vector<std::shared_ptr<SlabFile>>> of_disks(slabs.begin(), slabs.end());
  return std::make_shared<DiskLane>(std::move(groups), std::move(of_disks), options, std::move(wrap));
}

py::list states(const DiskLane& lane) {
  py::list list;
  for (const DiskState& s : lane.states())
    list.append(py::make_tuple(s.lost, to_text(s.reason), to_text(s.backend), to_text(s.note)));
  return list;
}

py::list full_reasons(const DiskLane& lane) {
  py::list list;
  for (const std::string& reason : lane.full_reasons()) list.append(to_text(reason));
  return list;
}

py::dict disk_counts(const DiskLane& lane, int32_t disk) { return to_dict(lane.counts(disk)); }

}  // namespace

void bind_storage(py::module_& m) {
  m.attr("PAGE_VERSION") = kPageVersion;
  m.def("uring_refusal", &uring_refusal);
  NativeBinding<PageCodec, std::shared_ptr<PageCodec>>(m, "PageCodec")
      .def(py::init(&make_codec), py::arg("stripe_bytes"), py::arg("runs"), py::arg("host_digests") = false,
           py::arg("group") = 0)
      .def_property_readonly("group", &PageCodec::group)
      .def_property_readonly("image_bytes", &PageCodec::image_bytes)
      .def_property_readonly("trailer_offset", [](const PageCodec& c) { return c.image().trailer_offset(); })
      .def_property_readonly("trailer_bytes", [](const PageCodec& c) { return c.image().trailer_bytes(); })
      .def_property_readonly("layers", &PageCodec::layers)
      .def_property_readonly("ranks", [](const PageCodec& c) { return c.image().ranks(); })
      .def(
          "stripe_offset", [](const PageCodec& c, int32_t rank) { return c.image().stripe_offset(rank); },
          py::arg("rank"))
      .def("digest_offset", &PageCodec::digest_offset, py::arg("rank"))
      .def("seal", &seal, py::arg("image"), py::arg("slab_id"), py::arg("slot"), py::arg("tag"),
           py::arg("written"))
      .def("check", &check, py::arg("image"), py::arg("slab_id"), py::arg("slot"), py::arg("tag"),
           py::arg("now"), py::arg("data") = true)
      .def("seal_apart", &seal_apart, py::arg("image"), py::arg("trailer"), py::arg("slab_id"),
           py::arg("slot"), py::arg("tag"), py::arg("written"))
      .def("check_apart", &check_apart, py::arg("image"), py::arg("trailer"), py::arg("slab_id"),
           py::arg("slot"), py::arg("tag"), py::arg("now"))
      .def("trailer", &trailer, py::arg("image"));
  NativeBinding<SlabFile, std::shared_ptr<SlabFile>>(m, "SlabFile")
      .def(py::init([](std::string path, int64_t header_bytes, int64_t slot_bytes, int64_t slots, uint64_t id,
                       int lock_fd, bool read_only) {
             const py::gil_scoped_release release;
             const SlabShape shape{header_bytes, slot_bytes, slots, id};
             return std::shared_ptr<SlabFile>(new SlabFile(std::move(path), shape, lock_fd, read_only),
                                              CloseWithoutGil{});
           }),
           py::arg("path"), py::arg("header_bytes"), py::arg("slot_bytes"), py::arg("slots"), py::arg("id"),
           py::arg("lock_fd") = -1, py::arg("read_only") = false)
      .def_property_readonly("direct", &SlabFile::direct)
      .def_property_readonly("buffered_because", &SlabFile::buffered_because)
      .def_property_readonly("fd", &SlabFile::fd)
      .def_property_readonly("row",
                             [](const SlabFile& f) {
                               const SlabShape& s = f.shape();
                               return py::make_tuple(to_path(f.path()), s.header_bytes, s.slot_bytes, s.slots,
                                                     s.id);
                             })
      // The check runs without the GIL, because it waits if the file's server does not answer.
      .def_property_readonly("in_place",
                             py::cpp_function(&SlabFile::in_place, py::call_guard<py::gil_scoped_release>()))
      .def(
          "offset",
          [](const SlabFile& f, int64_t slot) {
            // For slot number `slots`, offset() returns the slab's end.
            if (slot >= 0 && slot <= f.shape().slots) return f.offset(slot);
            throw BlockRangeError("slot " + std::to_string(slot) + " of " + f.path() + ": allowed are [0, " +
                                  std::to_string(f.shape().slots) + "]");
          },
          py::arg("slot"))
      .def("sync", &SlabFile::sync, py::call_guard<py::gil_scoped_release>());
  NativeBinding<QueueWrapper, std::shared_ptr<QueueWrapper>>(m, "QueueWrapper");
  NativeBinding<DiskLane, Lane, std::shared_ptr<DiskLane>>(m, "DiskLane")
      .def(py::init(&make_disk_lane), py::arg("codecs"), py::arg("pools"), py::arg("slabs"), py::arg("io"),
           py::arg("depth"), py::arg("stuck_s"), py::arg("wrapper") = py::none(),
           py::arg("zero_fill") = false, py::arg("register_buffers") = false)
      .def("take_out", &DiskLane::take_out, py::arg("disk"), py::arg("reason"),
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("zero_fill", &DiskLane::zero_fill)
      .def_property_readonly("files_closed", &DiskLane::files_closed)
      .def("states", &states)
      .def("full_reasons", &full_reasons)
      .def("counts", &disk_counts, py::arg("disk"));
}

}  // namespace flexkv
