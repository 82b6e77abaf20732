// One direction of a GPU's lane: a thread that takes items, enqueues their copies, and ends items whose
// copies have ended.
// A kernel copies as much of an item as its tables have room for. The copy engine gets portions, of which
// kPortionsUnderWay are under way, and serves other streams between them. Work that the engine's stream waits
// for is enqueued at once, however much is under way. When a portion is due, the thread looks for its end in
// a loop that does not call the driver. A late portion probably waits behind the engine's work, so the thread
// only looks for its end from time to time.
#pragma once
#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/copier.h"
#include "cuda/item_move.h"

namespace flexkv::cuda {

class LaneDirection {
 public:
  // Precondition: the device is current. Throws CapacityError.
  LaneDirection(Direction direction, std::shared_ptr<Device> device, std::shared_ptr<Copier> copier,
                std::shared_ptr<DigestCrew> digests);

  // The thread runs this until end(). If it cannot get the device's context, every item fails with that
  // reason.
  void run(WorkSource& source, int32_t lane);
  // Any thread may call the next two.
  void wake();
  void end();

 private:
  // Work enqueued on a stream as one unit.
  struct Portion {
    std::shared_ptr<ItemMove> move;
    std::shared_ptr<Part> part;
    uint32_t mark = 0;
    int64_t bytes = 0;
    bool by_kernel = false;
    bool stopped = false;
    std::shared_ptr<StreamEvent> fence;  // of the engine's stream, for which it may still wait
    Clock::time_point due;               // it will hardly end before this
  };
  struct Queue {
    std::unique_ptr<CopyStream> stream;
    std::deque<Portion> under_way;
    std::shared_ptr<StreamEvent> waited_for;
    Clock::time_point last_end;
    bool went_on = false;  // another portion was under way when the last one ended
    Clock::time_point last_query;
    // Unit: seconds per byte. Speed of the latest portions, by the copy engine and by kernel.
    std::array<double, 2> pace{};
  };

  Queue& queue_of(const ItemMove& move) const;
  bool has_room(const Queue& queue) const;
  void look_at_items(WorkSource& source, int32_t lane);
  bool take_one(WorkSource& source, int32_t lane);
  void stop_cancelled(WorkSource& source);
  void say_issued(WorkSource& source, const ItemMove& move, int32_t stage);
  bool end_portions(WorkSource& source);
  void end_portion(WorkSource& source, Queue& queue, const std::string& error);
  bool enqueue_expedited(WorkSource& source);
  bool enqueue_in_turn(WorkSource& source);
  int64_t layerwise_moves() const;
  void enqueue(WorkSource& source, const std::shared_ptr<ItemMove>& move);
  std::string enqueue_next(const WorkItem& item, Part& part, Queue& queue, Portion& portion);
  void part_is_enqueued(WorkSource& source, ItemMove& move, Part& part);
  bool make_digests(WorkSource& source);
  void end_part(WorkSource& source, ItemMove& move, const Part& part);
  void finish_pages(WorkSource& source, ItemMove& move);
  void begin_move(std::shared_ptr<WorkItem> item);
  static void set_due(Queue& queue);
  static void learn_pace(Queue& queue, const Portion& ended);
  void end_failed(WorkSource& source, Queue& queue);
  Clock::time_point next_look(WorkSource& source, Queue& queue, Clock::time_point now);
  bool rest(WorkSource& source);

  const Direction direction_;
  const OpKind kind_;
  const std::shared_ptr<Device> device_;
  const std::shared_ptr<Copier> copier_;
  const std::shared_ptr<DigestCrew> digests_;
  std::string refused_;                         // why the thread has no context
  mutable std::array<Queue, 2> queues_;         // [1]: layerwise loads; [0]: all others
  std::list<std::shared_ptr<ItemMove>> moves_;  // in the order they were taken
  struct Undigested {
    std::shared_ptr<ItemMove> move;
    std::shared_ptr<Part> part;
    size_t done = 0;  // pages
  };
  std::deque<Undigested> undigested_;  // stored parts that have arrived
  std::vector<Copy> copies_;
  bool may_take_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> woken_{false};
  std::atomic<bool> ending_{false};
};

}  // namespace flexkv::cuda
