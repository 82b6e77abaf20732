// The raw I/O loop with which benchmarks/disk.py compares the disk tier. It uses the same I/O queue and does
// nothing else.
#include <cstdint>
#include <cstdio>
#include <exception>
#include <vector>

#include "io/io_queue.h"

// Moves `bytes` between each buffers[i] and the file `fd` at offsets[i], with up to `depth` I/Os in flight.
// Returns 0 if all I/Os were complete, 1 if one was not, and 2 after an exception.
extern "C" int raw_loop(int fd, const uint64_t* buffers, const int64_t* offsets, int64_t count, int64_t bytes,
                        int write, int depth) try {
  const auto queue = flexkv::make_io_queue(flexkv::IoBackend::kAuto, depth);
  std::vector<flexkv::IoDone> done;
  int64_t next = 0;
  int64_t ended = 0;
  bool whole = true;
  while (ended < count) {
    for (; next < count && next - ended < depth; ++next) {
      auto* buffer = reinterpret_cast<std::byte*>(buffers[next]);
      queue->submit({write != 0, fd, buffer, bytes, offsets[next], static_cast<uint64_t>(next)});
    }
    done.clear();
    queue->wait(done);
    ended += static_cast<int64_t>(done.size());
    for (const flexkv::IoDone& one : done) whole &= one.result == bytes;
  }
  return whole ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 2;
}
