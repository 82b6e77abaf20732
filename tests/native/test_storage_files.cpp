// Tests trailers and slab files: the required content of a page's trailer, the sectors that the read of a
// range of layers covers, and the lock that open slabs keep on their folder.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/align.h"
#include "io/io_queue.h"
#include "page_world.h"
#include "storage/layer_reads.h"
#include "storage/zero_fill.h"

namespace flexkv {
namespace {

constexpr uint64_t kNow = 1'000;

// A slab file that the destructor removes.
struct NamedSlab {
  explicit NamedSlab(std::string name, const PageCodec& codec, int32_t slots)
      : path(std::move(name)), shape(make_slab(path, codec, slots, 1)) {}
  ~NamedSlab() { std::remove(path.c_str()); }
  const std::string path;
  const SlabShape shape;
};

}  // namespace

TEST_CASE("a trailer is accepted for its own place, group and tag alone, and its miss says what differs") {
  const auto codec = page_codec(3, 2304, 2);
  const PagePlace place{7, 5};
  PageTag tag = tag_of(3);
  tag.epoch = 4;
  tag.tokens = 16;
  tag.expiry = kNow + 1;
  std::vector<std::byte> image(static_cast<size_t>(codec->image_bytes()), std::byte{1});
  codec->seal(image.data(), place, tag, kNow);
  const auto check = [&](PagePlace at, const PageTag& wanted, uint64_t now = kNow) {
    return codec->check_trailer(image.data(), at, wanted, now).miss;
  };
  CHECK(check(place, tag) == PageMiss::kNone);
  CHECK(check({8, 5}, tag) == PageMiss::kElsewhere);
  CHECK(check({7, 4}, tag) == PageMiss::kElsewhere);
  CHECK(check(place, tag, kNow + 1) == PageMiss::kExpired);
  const auto with = [&](const std::function<void(PageTag&)>& change) {
    PageTag wanted = tag;
    change(wanted);
    return check(place, wanted);
  };
  CHECK(with([](PageTag& wanted) { wanted.key[15] ^= 1; }) == PageMiss::kKey);
  CHECK(with([](PageTag& wanted) { ++wanted.generation; }) == PageMiss::kGeneration);
  CHECK(with([](PageTag& wanted) { --wanted.generation; }) == PageMiss::kGeneration);
  CHECK(with([](PageTag& wanted) { ++wanted.epoch; }) == PageMiss::kEpoch);
  CHECK(with([](PageTag& wanted) { ++wanted.tokens; }) == PageMiss::kTokens);
  // The trailer's expiry is not compared with the requested one: the read checks only whether the page has
  // expired.
  CHECK(with([](PageTag& wanted) { ++wanted.expiry; }) == PageMiss::kNone);
  CHECK(page_codec(3, 2304, 1)->check_trailer(image.data(), place, tag, kNow).miss == PageMiss::kGroup);
  // The trailer's digest covers each byte of the trailer, including those of the last run's digest.
  const auto trailer = static_cast<size_t>(codec->image().trailer_offset());
  for (size_t at = 0; at < static_cast<size_t>(codec->image().trailer_bytes()); ++at) {
    image[trailer + at] ^= std::byte{1};
    CHECK(check(place, tag) != PageMiss::kNone);
    image[trailer + at] ^= std::byte{1};
  }
  CHECK(check(place, tag) == PageMiss::kNone);
}

TEST_CASE("a range of layers reads whole sectors, each once, with every byte of its runs") {
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    const auto layers = static_cast<int32_t>(1 + random() % 40);
    std::vector<PageRun> runs;
    int64_t end = 0;
    for (int32_t layer = 0; layer < layers; ++layer) {
      const int64_t bytes = 8 * static_cast<int64_t>(1 + random() % 1500);
      runs.push_back({end, bytes, layer});
      end += bytes;
    }
    const PageCodec codec({end}, {runs}, false);
    int32_t next = 0;
    for (const LayerReads& reads : plan_layer_reads(codec)) {
      CHECK(reads.lo == next);
      next = reads.hi;
      CHECK(reads.runs.size() == static_cast<size_t>(reads.hi - reads.lo));
      int64_t before = -1;
      for (const ImageSpan& span : reads.spans) {
        CHECK(span.offset > before);
        CHECK(span.offset % kIoAlignBytes == 0);
        CHECK(span.bytes % kIoAlignBytes == 0);
        before = span.offset + span.bytes;
      }
      bool alone = true;
      for (const PageRun& run : codec.runs()) {
        const bool ours = run.layer >= reads.lo && run.layer < reads.hi;
        bool whole = false;
        for (const ImageSpan& span : reads.spans) {
          whole |= span.offset <= run.offset && run.offset + run.bytes <= span.offset + span.bytes;
          alone &= ours || run.offset + run.bytes <= span.offset || span.offset + span.bytes <= run.offset;
        }
        CHECK((whole || !ours));
      }
      CHECK(reads.alone == alone);
    }
    CHECK(next == layers);
  }
}

TEST_CASE("zeros written ahead leave pages as they are") {
  const auto codec = page_codec(1, 4096);
  const NamedSlab named("slab-zeros", *codec, 64);
  const auto slab = std::make_shared<SlabFile>(named.path, named.shape, -1);
  std::vector<std::byte> page(static_cast<size_t>(named.shape.slot_bytes), std::byte{9});
  const int fd = open(named.path.c_str(), O_RDWR | O_CLOEXEC);
  const auto size = static_cast<ssize_t>(page.size());
  for (const int64_t slot : {0, 3, 40})
    REQUIRE(pwrite(fd, page.data(), page.size(), slab->offset(slot)) == size);
  ZeroFill fill({slab});
  CHECK(fill.step() == 0);  // no page was written yet, so no slot after a page needs zeros
  fill.wrote(0, 3);
  int64_t written = 1;
  for (int step = 0; written > 0 && step < 1000; ++step) written = fill.step();
  CHECK(written == 0);
  for (const int64_t slot : {0, 3, 40}) {
    std::vector<std::byte> found(page.size());
    REQUIRE(pread(fd, found.data(), found.size(), slab->offset(slot)) == size);
    CHECK(found == page);
  }
  close(fd);
}

TEST_CASE("a slab knows whether its path still names it") {
  const auto codec = page_codec(1, 4096);
  const NamedSlab named("slab-moved", *codec, 2);
  const SlabFile slab(named.path, named.shape, -1);
  CHECK(slab.in_place());
  const NamedSlab other("slab-other", *codec, 2);
  REQUIRE(std::rename(other.path.c_str(), named.path.c_str()) == 0);
  CHECK(!slab.in_place());
  REQUIRE(std::remove(named.path.c_str()) == 0);
  CHECK(!slab.in_place());
  CHECK(slab.sync() == 0);
}

TEST_CASE("a folder stays locked until the last of its slabs is closed") {
  const auto codec = page_codec(1, 4096);
  const NamedSlab named("slab-locked", *codec, 2);
  const std::string path = "slab-lock";
  const int lock = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  REQUIRE(flock(lock, LOCK_EX | LOCK_NB) == 0);
  auto slab = std::make_unique<SlabFile>(named.path, named.shape, lock);
  close(lock);
  const int another = open(path.c_str(), O_RDWR | O_CLOEXEC);
  CHECK(flock(another, LOCK_EX | LOCK_NB) != 0);
  CHECK(errno == EWOULDBLOCK);
  slab.reset();
  CHECK(flock(another, LOCK_EX | LOCK_NB) == 0);
  close(another);
  std::remove(path.c_str());
}

TEST_CASE("an I/O queue reports the error of an I/O, and reads past registered memory") {
  for (const IoBackend io : {IoBackend::kThreads, IoBackend::kUring}) {
    if (io == IoBackend::kUring && !uring_refusal().empty()) continue;
    const auto codec = page_codec(1, 4096);
    const NamedSlab named("slab-queue", *codec, 2);
    const SlabFile slab(named.path, named.shape, -1);
    constexpr int64_t kBytes = 2 * kIoAlignBytes;
    const std::unique_ptr<std::byte, void (*)(void*)> buffer(
        static_cast<std::byte*>(std::aligned_alloc(kIoAlignBytes, kBytes)), std::free);
    IoMemories memories;
    memories.parts.push_back({buffer.get(), kIoAlignBytes});  // only half of the buffer is registered
    memories.refused = [](const std::string&) {};
    const auto queue = make_io_queue(io, 4, memories);
    const auto result = [&](int fd) {
      queue->submit({false, fd, buffer.get(), kBytes, 0, 3});
      std::vector<IoDone> done;
      while (done.empty()) queue->wait(done);
      CHECK(done.front().cookie == 3);
      return done.front().result;
    };
    CHECK(result(slab.fd()) == kBytes);
    CHECK(result(-1) == -EBADF);
    CHECK(result(slab.fd()) == kBytes);
  }
}

}  // namespace flexkv
