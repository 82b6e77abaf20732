// Binds csrc/share: boards (which list the pages in a unit's slots), and the directory of other units' pages.
// Calls that copy pages or read boards run without the GIL.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/bindings.h"
#include "bindings/byte_buffer.h"
#include "bindings/index_arguments.h"
#include "bindings/list_argument.h"
#include "bindings/native_class.h"
#include "share/peer_directory.h"
#include "share/slot_board.h"
#include "transfer/host_pool.h"

namespace py = pybind11;

namespace flexkv {
namespace {

using Words = py::array_t<uint64_t, py::array::c_style>;
using Numbers = py::array_t<uint32_t, py::array::c_style>;
using FilePart = std::tuple<int, int64_t>;
using PoolFile = std::tuple<int, int64_t, int64_t, int64_t, int64_t, int64_t>;
using SpanTuple = std::tuple<int64_t, int64_t, int64_t>;
using RunPart = std::tuple<int64_t, int64_t, int64_t, int64_t>;
using FormatParts = std::tuple<List<SpanTuple>, List<RunPart>>;

template <typename T, int Flags>
std::span<const T> row_of(const py::array_t<T, Flags>& array, const char* name) {
  if (array.ndim() != 1) throw ContractError(std::string(name) + " must have one dimension");
  require_aligned<ContractError>(array, name);
  return {array.data(), static_cast<size_t>(array.shape(0))};
}

void require_length(size_t length, size_t wanted, const char* name) {
  if (length == wanted) return;
  throw ContractError(std::to_string(length) + " " + name + " for " + std::to_string(wanted) + " pages");
}

void note(SlotBoard& board, const Slots& slots, const Numbers& tokens, const Words& generations,
          const Words& expiries, uint64_t epoch) {
  const auto of = row_of(slots, "slots");
  const auto valid = row_of(tokens, "tokens");
  const auto written = row_of(generations, "generations");
  const auto until = row_of(expiries, "expiries");
  require_length(valid.size(), of.size(), "tokens");
  if (!written.empty()) require_length(written.size(), of.size(), "generations");
  if (!until.empty()) require_length(until.size(), of.size(), "expiries");
  board.note(of, valid, written, until, epoch);
}

void require_slots(const SlotBoard& board, std::span<const int32_t> slots) {
  for (const int32_t slot : slots) {
    if (slot >= 0 && static_cast<uint32_t>(slot) < board.slots()) continue;
    throw BlockRangeError("board: slot " + std::to_string(slot) + "; allowed are 0 to " +
                          std::to_string(board.slots() - 1));
  }
}

void hide(SlotBoard& board, const Slots& slots) {
  const auto of = row_of(slots, "slots");
  require_slots(board, of);
  for (const int32_t slot : of) board.withdraw(static_cast<uint32_t>(slot));
}

void show(SlotBoard& board, const Slots& slots, uint32_t group, const py::array& keys) {
  const auto of = row_of(slots, "slots");
  const auto named = keys_of(keys);
  require_length(named.size(), of.size(), "keys");
  require_slots(board, of);
  for (size_t i = 0; i < of.size(); ++i) board.publish(static_cast<uint32_t>(of[i]), group, named[i]);
}

// Maps a peer's pool. Throws ClosedError if the pool cannot have the layout that the peer states.
PeerPool map_peer_pool(const PoolFile& told) {
  const auto [fd, bytes, offset, slot_bytes, per_extent, stride] = told;
  const bool right = offset >= 0 && offset < bytes && slot_bytes > 0 && slot_bytes % 4096 == 0 &&
                     slot_bytes <= bytes && per_extent > 0 && stride > 0 &&
                     per_extent <= stride / slot_bytes && offset % 8 == 0 && stride % 8 == 0;
  if (!right) throw ClosedError("a peer's pool has a layout that no pool has");
  return {SharedFile::read_only(fd, bytes, "a peer's pool"), offset, slot_bytes, per_extent, stride};
}

PeerFormat peer_format(const std::optional<PoolFile>& pool, const FormatParts& parts) {
  const auto& [pieces, runs] = parts;
  PeerFormat format;
  for (const auto& [from, to, bytes] : pieces) {
    const bool inside = pool && from >= 0 && bytes > 0 && from % 8 == 0 && to >= 0 && to % 8 == 0 &&
                        from <= std::get<3>(*pool) - bytes;
    if (!inside) throw ContractError("a piece lies outside the peer's slot, or not on 8 bytes");
    format.pieces.push_back({from, to, bytes});
  }
  for (const auto& [at, bytes, from, to] : runs) {
    if (at < 0 || bytes <= 0 || !pool || from > std::get<3>(*pool) - 8 || (from >= 0 && from % 8 != 0)) {
      throw ContractError("a run or its digest lies outside the peer's slot");
    }
    format.runs.push_back({at, bytes, from, to});
  }
  return format;
}

int32_t add_peer(PeerDirectory& directory, const FilePart& board, const std::optional<PoolFile>& pool,
                 const List<FormatParts>& formats) {
  if (formats.empty()) throw ContractError("formats of 0 groups; a peer has one at least");
  std::vector<PeerFormat> of_groups;
  for (const FormatParts& parts : formats) of_groups.push_back(peer_format(pool, parts));
  const py::gil_scoped_release release;
  std::optional<PeerPool> mapped;
  if (pool) mapped.emplace(map_peer_pool(*pool));
  auto rows = SharedFile::read_only(std::get<0>(board), std::get<1>(board), "a peer's board");
  return directory.add(std::move(rows), std::move(mapped), std::move(of_groups));
}

py::tuple arrays_of(const std::vector<PeerNews>& news) {
  Bytes keys({news.size(), kKeyBytes});
  Numbers groups(static_cast<py::ssize_t>(news.size()));
  Numbers tokens(static_cast<py::ssize_t>(news.size()));
  Words expiries(static_cast<py::ssize_t>(news.size()));
  py::array_t<bool> there(static_cast<py::ssize_t>(news.size()));
  for (size_t i = 0; i < news.size(); ++i) {
    std::memcpy(keys.mutable_data() + i * kKeyBytes, &news[i].key, kKeyBytes);
    groups.mutable_data()[i] = news[i].group;
    tokens.mutable_data()[i] = news[i].tokens;
    expiries.mutable_data()[i] = news[i].expiry;
    there.mutable_data()[i] = news[i].there;
  }
  return py::make_tuple(keys, groups, tokens, expiries, there);
}

py::tuple take(PeerDirectory& directory, size_t most) {
  std::vector<PeerNews> news;
  directory.take(most, news);
  return arrays_of(news);
}

std::optional<py::tuple> take_of(PeerDirectory& directory, uint32_t group, const py::array& keys) {
  std::vector<PeerNews> news;
  if (directory.take_of(keys_of(keys), group, news) == 0) return std::nullopt;
  return arrays_of(news);
}

// Throws ContractError if copies in this format would write outside a slot of `slot_bytes` bytes.
void require_room(const PeerFormat& format, int64_t slot_bytes) {
  for (const PagePiece& piece : format.pieces) {
    if (piece.to > slot_bytes - piece.bytes) throw ContractError("a piece lies outside this unit's slot");
  }
  for (const PieceRun& run : format.runs) {
    if (run.at > slot_bytes - run.bytes || run.digest_to > slot_bytes - 8) {
      throw ContractError("a run or its digest lies outside this unit's slot");
    }
  }
}

py::tuple bring(PeerDirectory& directory, const HostPool& pool, uint32_t group, const py::array& keys,
                const Numbers& tokens, const Words& expiries, const Slots& slots) {
  const auto wanted = keys_of(keys);
  const auto valid = row_of(tokens, "tokens");
  const auto until = row_of(expiries, "expiries");
  const auto targets = row_of(slots, "slots");
  require_length(valid.size(), wanted.size(), "tokens");
  require_length(until.size(), wanted.size(), "expiries");
  require_length(targets.size(), wanted.size(), "slots");
  for (const int32_t slot : targets) pool.slot(slot);  // throws if there is no such slot
  const auto count = static_cast<py::ssize_t>(wanted.size());
  Bytes ends(count);
  Slots peers(count);
  Slots places(count);
  uint8_t* ended = ends.mutable_data();
  int32_t* holders = peers.mutable_data();
  int32_t* at = places.mutable_data();
  const py::gil_scoped_release release;
  directory.each_format([&](const PeerFormat& format) { require_room(format, pool.geometry().slot_bytes); });
  for (size_t i = 0; i < wanted.size(); ++i) {
    PeerPlace other;
    RowFacts asked;
    asked.key = wanted[i];
    asked.group = group;
    asked.tokens = valid[i];
    asked.expiry = until[i];
    const PeerEnd end = directory.bring(asked, pool.slot_address(targets[i]), other);
    ended[i] = static_cast<uint8_t>(end);
    holders[i] = other.peer;
    at[i] = static_cast<int32_t>(other.slot);
  }
  const py::gil_scoped_acquire acquire;
  return py::make_tuple(ends, peers, places);
}

int read(PeerDirectory& directory, int32_t peer, uint32_t slot, uint32_t group, const py::array& key,
         uint32_t tokens, uint64_t expiry, const py::buffer& image) {
  const auto keys = keys_of(key);
  require_length(keys.size(), 1, "keys");
  const ByteBuffer bytes(image, ByteBuffer::kWritable);
  if (reinterpret_cast<uintptr_t>(bytes.data()) % 8 != 0) throw ContractError("an image that is not aligned");
  const PeerPlace place{.peer = peer,
                        .slot = slot,
                        .facts = {.key = keys[0], .group = group, .tokens = tokens, .expiry = expiry}};
  const py::gil_scoped_release release;
  return static_cast<int>(directory.read(place, bytes.data(), bytes.size()));
}

py::tuple find(const PeerDirectory& directory, uint32_t group, const py::array& keys,
               const std::optional<Slots>& without) {
  const auto wanted = keys_of(keys);
  const auto others = without ? row_of(*without, "without") : std::span<const int32_t>();
  const auto count = static_cast<py::ssize_t>(wanted.size());
  Slots peers(count);
  Slots slots(count);
  Words generations(count);
  Words expiries(count);
  Words epochs(count);
  std::vector<PeerPlace> places;
  directory.find(wanted, group, others, places);
  for (py::ssize_t i = 0; i < count; ++i) {
    const PeerPlace& place = places[static_cast<size_t>(i)];
    peers.mutable_data()[i] = place.peer;
    slots.mutable_data()[i] = static_cast<int32_t>(place.slot);
    generations.mutable_data()[i] = place.facts.generation;
    expiries.mutable_data()[i] = place.facts.expiry;
    epochs.mutable_data()[i] = place.facts.epoch;
  }
  return py::make_tuple(peers, slots, generations, expiries, epochs);
}

std::shared_ptr<SlotBoard> make_board(uint32_t slots) {
  if (slots == 0 || slots > static_cast<uint32_t>(INT32_MAX)) {
    throw BlockRangeError("a board of " + std::to_string(slots) + " slots; allowed are 1 to 2**31 - 1");
  }
  return std::make_shared<SlotBoard>(slots);
}

}  // namespace

void bind_share(py::module_& m) {
  NativeBinding<SlotBoard, std::shared_ptr<SlotBoard>>(m, "SlotBoard")
      .def(py::init(&make_board), py::arg("slots"))
      .def_property_readonly("fd", &SlotBoard::fd)
      .def_property_readonly("bytes", &SlotBoard::bytes)
      .def("note", &note, py::arg("slots").noconvert(), py::arg("tokens").noconvert(),
           py::arg("generations").noconvert(), py::arg("expiries").noconvert(), py::arg("epoch"))
      .def("hide", &hide, py::arg("slots").noconvert())
      .def("show", &show, py::arg("slots").noconvert(), py::arg("group"), py::arg("keys"))
      .def("retire", &SlotBoard::retire);
  NativeBinding<PeerDirectory, std::shared_ptr<PeerDirectory>>(m, "PeerDirectory")
      .def(py::init<>())
      .def("add", &add_peer, py::arg("board"), py::arg("pool") = py::none(),
           py::arg("formats") = py::make_tuple(py::make_tuple(py::tuple(), py::tuple())))
      .def("drop", &PeerDirectory::drop, py::arg("peer"), py::arg("keep") = false,
           py::call_guard<py::gil_scoped_release>())
      .def("follow", py::overload_cast<>(&PeerDirectory::follow), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("has_news", &PeerDirectory::has_news)
      .def("take", &take, py::arg("most"))
      .def("take_of", &take_of, py::arg("group"), py::arg("keys"))
      .def("bring", &bring, py::arg("pool"), py::arg("group"), py::arg("keys"), py::arg("tokens").noconvert(),
           py::arg("expiries").noconvert(), py::arg("slots").noconvert())
      .def("read", &read, py::arg("peer"), py::arg("slot"), py::arg("group"), py::arg("key"),
           py::arg("tokens"), py::arg("expiry"), py::arg("image"))
      .def("find", &find, py::arg("group"), py::arg("keys"), py::arg("without").noconvert() = py::none())
      .def("retired", &PeerDirectory::retired, py::arg("peer"))
      .def("counts", &PeerDirectory::counts, py::arg("peer"))
      .def("pages", &PeerDirectory::pages, py::arg("peer"))
      .def_property_readonly("overruns", &PeerDirectory::overruns);
}

}  // namespace flexkv
