// A unit that shares its slots with other units, for tests of boards and of the code that reads boards.
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "share/peer_directory.h"

namespace flexkv {

inline constexpr int64_t kShareSlotBytes = 4096;
inline constexpr uint32_t kShareTokens = 16;
inline constexpr size_t kShareWords = kShareSlotBytes / 8;

inline BlockKey share_key(uint64_t number) { return {number * 0x9E3779B97F4A7C15u, number}; }

inline uint64_t page_word(const BlockKey& key, size_t word) { return key.low ^ (word * 0xD1B54A32D192ED03u); }

// A unit that shares `slots` slots: its board, and its pool, into which it writes complete pages.
struct SharingUnit {
  explicit SharingUnit(uint32_t slots)
      : board(slots), pool(SharedFile::make("test-pool", int64_t{slots} * kShareSlotBytes)) {}

  void write(uint32_t slot, const BlockKey& key, uint64_t expiry = 0, uint32_t group = 0) {
    const auto number = static_cast<int32_t>(slot);
    board.begin(slot);
    auto* words = reinterpret_cast<std::atomic<uint64_t>*>(pool.base() + slot * kShareSlotBytes);
    for (size_t word = 0; word < kShareWords; ++word) {
      words[word].store(page_word(key, word), std::memory_order_release);
    }
    board.note({&number, 1}, {&kShareTokens, 1}, {}, {&expiry, 1}, 0);
    board.publish(slot, group, key);
  }

  int32_t join(PeerDirectory& directory, PeerFormat format = {{{0, 0, kShareSlotBytes}}, {}}) const {
    return directory.add(SharedFile::read_only(board.fd(), board.bytes(), "board"), mapped_pool(),
                         {std::move(format)});
  }

  PeerPool mapped_pool() const {
    return {SharedFile::read_only(pool.fd(), pool.bytes(), "pool"), 0, kShareSlotBytes, board.slots(),
            pool.bytes()};
  }

  SlotBoard board;
  SharedFile pool;
};

struct alignas(64) CopiedPage {
  std::array<uint64_t, kShareWords> words{};
  std::byte* bytes() { return reinterpret_cast<std::byte*>(words.data()); }
  bool is(const BlockKey& key) const {
    for (size_t word = 0; word < kShareWords; ++word) {
      if (words[word] != page_word(key, word)) return false;
    }
    return true;
  }
};

inline PeerEnd bring_page(PeerDirectory& directory, const BlockKey& key, CopiedPage& page,
                          uint64_t expiry = 0, uint32_t group = 0) {
  PeerPlace other;
  RowFacts asked;
  asked.key = key;
  asked.group = group;
  asked.tokens = kShareTokens;
  asked.expiry = expiry;
  return directory.bring(asked, page.bytes(), other);
}

inline std::vector<PeerNews> take_all(PeerDirectory& directory) {
  std::vector<PeerNews> all;
  std::vector<PeerNews> some;
  while (directory.take(1000, some) > 0) all.insert(all.end(), some.begin(), some.end());
  return all;
}

// A thread that writes new pages into random slots as fast as it can, until the destructor stops it.
class FastWriter {
 public:
  explicit FastWriter(SharingUnit& unit) : unit_(unit), thread_([this] { run(); }) {}
  ~FastWriter() {
    stop_.store(true);
    thread_.join();
  }
  uint64_t newest() const { return newest_.load(std::memory_order_acquire); }

 private:
  void run() {
    std::mt19937 random(1);
    for (uint64_t number = 1; !stop_.load(std::memory_order_relaxed); ++number) {
      unit_.write(static_cast<uint32_t>(random() % unit_.board.slots()), share_key(number));
      newest_.store(number, std::memory_order_release);
    }
  }

  SharingUnit& unit_;
  std::atomic<bool> stop_{false};
  std::atomic<uint64_t> newest_{0};
  std::thread thread_;
};

}  // namespace flexkv
