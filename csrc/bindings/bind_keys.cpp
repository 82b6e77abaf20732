// Binds the hashes and key chains of csrc/index.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>

#include "base/error.h"
#include "bindings/bindings.h"
#include "bindings/engine_key_reader.h"
#include "bindings/native_class.h"
#include "bindings/token_reader.h"
#include "index/key_hasher.h"
#include "index/row_buffer.h"
#include "index/sha256.h"
#include "index/token_chain.h"

namespace py = pybind11;

namespace flexkv {
namespace {

// Unit: tokens. The maximum number of tokens that one call of tail_keys hashes. Hashing this many tokens
// takes some seconds, with the GIL held. A tail is shorter than a block; all possible tails of a block of
// 4096 tokens together have 2**23 tokens.
constexpr size_t kMostTailTokens = size_t{1} << 30;

std::span<const uint8_t> span_of(const py::bytes& value) {
  return {reinterpret_cast<const uint8_t*>(PyBytes_AS_STRING(value.ptr())),
          static_cast<size_t>(PyBytes_GET_SIZE(value.ptr()))};
}

KeyHasher hasher_of(const py::bytes& name_space, uint32_t group) {
  Sha256Digest digest;
  const auto bytes = span_of(name_space);
  const bool is_marked = bytes.size() == digest.size() + kMarkBytes;
  if (bytes.size() != digest.size() && !is_marked) {
    throw KeySchemeError("the namespace has " + std::to_string(bytes.size()) +
                         " bytes; allowed are the 32 of namespace_digest, and 34 with a mark");
  }
  std::copy_n(bytes.begin(), digest.size(), digest.begin());
  std::optional<KeyMark> mark;
  if (is_marked) std::copy_n(bytes.begin() + digest.size(), kMarkBytes, mark.emplace().begin());
  return {digest, group, mark};
}

// Returns a read-only array [rows, row_bytes] over the buffer's memory. The array keeps the memory alive.
py::array view_of_rows(const RowBuffer& rows) {
  const auto count = static_cast<py::ssize_t>(rows.rows());
  const auto bytes = static_cast<py::ssize_t>(rows.row_bytes());
  if (count == 0) return py::array_t<uint8_t>({count, bytes});
  auto owner = std::make_unique<std::shared_ptr<uint8_t[]>>(rows.storage());
  const py::capsule base(owner.get(),
                         [](void* held) { delete static_cast<std::shared_ptr<uint8_t[]>*>(held); });
  const uint8_t* data = owner.release()->get();
  py::array view = py::array_t<uint8_t>({count, bytes}, data, base);
  view.attr("setflags")(false);
  return view;
}

// Returns the index, in a list, of the first item that a chain does not have yet. The list starts at block
// (or token) `start` of the chain, and the chain already has its first `done` items. Throws ContractError if
// `start` is greater than `done`.
size_t first_new(size_t done, size_t start) {
  if (start <= done) return done - start;
  throw ContractError("extend: the list starts at " + std::to_string(start) + " and the chain ends at " +
                      std::to_string(done));
}

}  // namespace

class EngineKeyChain {
 public:
  EngineKeyChain(const py::bytes& name_space, uint32_t group) : hasher_(hasher_of(name_space, group)) {}

  size_t extend(py::handle engine_keys, size_t start) {
    const size_t begin = first_new(keys_.rows(), start);
    const size_t end = EngineKeyReader::count(engine_keys);
    if (begin >= end) return 0;
    const EngineKeyReader reader(engine_keys, begin, end);
    hasher_.block_keys(reader.keys(), keys_.reserve(end - begin));
    keys_.commit(end - begin);
    return end - begin;
  }

  const RowBuffer& keys() const { return keys_; }
  void truncate(size_t blocks) { keys_.truncate(blocks); }

 private:
  KeyHasher hasher_;
  RowBuffer keys_{kKeyBytes};
};

namespace {

size_t extend_tokens(TokenChain& chain, py::handle tokens, size_t start) {
  const size_t blocks = chain.blocks();
  const size_t begin = first_new(chain.next_token(), start);
  const size_t whole = chain.blocks_of(token_count(tokens) + start);
  if (whole <= blocks) return 0;
  const size_t count = whole - blocks;
  const auto ids = read_tokens(tokens, begin, chain.tokens_read(count));
  // If a token is not an int, reading it calls its __index__, which may run any code and so may change the
  // chain.
  if (chain.blocks() != blocks) throw ContractError("extend: the chain was changed while tokens were read");
  chain.append(ids, count);
  return count;
}

std::span<const uint8_t> parent_of(const std::optional<py::bytes>& parent, size_t base_block) {
  if (!parent) {
    if (base_block > 0) throw KeySchemeError("a tail after whole blocks needs the last one's engine key");
    return {};
  }
  if (base_block == 0) throw KeySchemeError("a tail without a block before it has no parent key");
  check_engine_key_bytes(span_of(*parent).size(), base_block - 1);
  return span_of(*parent);
}

py::array_t<uint8_t> tail_keys(const py::bytes& name_space, uint32_t group,
                               const std::optional<py::bytes>& parent, const py::bytes& extra,
                               py::handle tokens, size_t longest, size_t shortest, size_t base_block) {
  const KeyHasher hasher = hasher_of(name_space, group);
  const auto parent_bytes = parent_of(parent, base_block);
  if (shortest == 0 || longest < shortest) {
    throw ContractError("tail_keys: counts from " + std::to_string(longest) + " down to " +
                        std::to_string(shortest) + "; a tail has at least one token");
  }
  const size_t count = longest - shortest + 1;
  if (count > kMostTailTokens / longest) {
    throw ContractError("tail_keys: counts from " + std::to_string(longest) + " down to " +
                        std::to_string(shortest) + " hash each token up to " + std::to_string(count) +
                        " times; allowed are " + std::to_string(kMostTailTokens) + " tokens in all");
  }
  const auto ids = read_tokens(tokens, 0, longest);
  py::array_t<uint8_t> keys({count, kKeyBytes});
  for (size_t i = 0; i < count; ++i) {
    hasher.tail_key(parent_bytes, span_of(extra), std::span(ids).first(longest - i),
                    keys.mutable_data() + i * kKeyBytes);
  }
  return keys;
}

py::bytes hash_bytes(const py::bytes& data, bool portable) {
  Sha256 hash(portable ? sha256_compress_portable : sha256_compress());
  hash.update(span_of(data).data(), span_of(data).size());
  const Sha256Digest digest = hash.finish();
  return py::bytes(reinterpret_cast<const char*>(digest.data()), digest.size());
}

}  // namespace

void bind_keys(py::module_& m) {
  m.def("sha256", &hash_bytes, py::arg("data"), py::arg("portable") = false);
  m.def("sha256_is_native", [] { return sha256_native_compress() != nullptr; });
  m.def("tail_keys", &tail_keys, py::arg("namespace"), py::arg("group"), py::arg("parent_key"),
        py::arg("extra"), py::arg("tokens"), py::arg("longest"), py::arg("shortest"), py::arg("base_block"));

  NativeBinding<EngineKeyChain>(m, "EngineKeyChain")
      .def(py::init<const py::bytes&, uint32_t>(), py::arg("namespace"), py::arg("group"))
      .def("extend", &EngineKeyChain::extend, py::arg("engine_keys"), py::arg("start") = 0)
      .def("truncate", &EngineKeyChain::truncate, py::arg("blocks"))
      .def_property_readonly("keys", [](const EngineKeyChain& chain) { return view_of_rows(chain.keys()); })
      .def("__len__", [](const EngineKeyChain& chain) { return chain.keys().rows(); });

  NativeBinding<TokenChain>(m, "TokenChain")
      .def(py::init([](size_t block_tokens, const py::bytes& seed, bool bigram) {
             return TokenChain(block_tokens, span_of(seed), bigram);
           }),
           py::arg("block_tokens"), py::arg("seed") = py::bytes(), py::arg("bigram") = false)
      .def("extend", &extend_tokens, py::arg("tokens"), py::arg("start") = 0)
      .def("truncate", &TokenChain::truncate, py::arg("blocks"))
      .def_property_readonly("digests", [](const TokenChain& chain) { return view_of_rows(chain.digests()); })
      .def_property_readonly("block_tokens", &TokenChain::block_tokens)
      .def("__len__", &TokenChain::blocks);
}

}  // namespace flexkv
