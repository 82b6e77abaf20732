// Pages for the tests of lanes that use slabs. All runs have the same length, and each slab is a file. A test
// identifies a page by a number, from which page_world.h makes the page's tag.
#pragma once
#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "storage/page_codec.h"
#include "storage/page_tag.h"
#include "storage/slab_file.h"
#include "transfer/engine.h"

namespace flexkv {

inline constexpr int64_t kSlabHeaderBytes = 4096;
// Unit: seconds. How long tests wait at most. The time is longer than any step of a test takes.
inline constexpr double kWaitS = 60;

// The codec of pages of one rank that have one run per layer.
inline std::shared_ptr<const PageCodec> page_codec(int32_t layers, int64_t run_bytes, uint32_t group = 0) {
  std::vector<PageRun> runs;
  for (int32_t layer = 0; layer < layers; ++layer) runs.push_back({layer * run_bytes, run_bytes, layer});
  return std::make_shared<PageCodec>(std::vector<int64_t>{layers * run_bytes},
                                     std::vector<std::vector<PageRun>>{runs}, false, group);
}

// Makes a slab file of zeros with space for `slots` images at `path`. Returns its shape.
inline SlabShape make_slab(const std::string& path, const PageCodec& codec, int32_t slots, uint64_t id) {
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0644);
  REQUIRE(fd >= 0);
  REQUIRE(ftruncate(fd, kSlabHeaderBytes + slots * codec.image_bytes()) == 0);
  close(fd);
  return {kSlabHeaderBytes, codec.image_bytes(), slots, id};
}

inline PageTag tag_of(int32_t number) {
  PageTag tag;
  tag.key[0] = static_cast<uint8_t>(number);
  tag.generation = static_cast<uint64_t>(number) + 1;
  return tag;
}

inline void add_tag(OpSpec& op, int32_t number) {
  const PageTag tag = tag_of(number);
  const auto* bytes = reinterpret_cast<const uint8_t*>(&tag);
  op.tags.insert(op.tags.end(), bytes, bytes + sizeof(tag));
}

// Submits a graph of one op and returns its ticket. The test fails if the engine's queue is full.
inline int64_t submit_op(TransferEngine& engine, OpSpec op) {
  GraphSpec graph;
  graph.ops.push_back(std::move(op));
  const auto ticket = engine.submit(std::move(graph));
  REQUIRE(ticket);
  return *ticket;
}

}  // namespace flexkv
