// One direction of a GPU's lane: a thread that takes work items, enqueues their copies, and finishes pages
// whose copies have ended. The copy engine gets portions of limited size, so that it can serve other streams
// between two portions; at most kPortionsInFlight portions are in flight. The kernel gets larger portions, up
// to the limits in copy_ways.h. If the inference engine's stream waits for an op, the op is enqueued at once,
// without these limits. When a portion is due, the thread polls for its end in a loop that does not call the
// driver. A portion that is late probably waits behind the inference engine's work, so the thread then polls
// only from time to time.
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
  // Precondition: the device is current. Throws CapacityError if the driver fails.
  LaneDirection(Direction direction, std::shared_ptr<Device> device, std::shared_ptr<Copier> copier,
                std::shared_ptr<DigestCrew> digests);

  // The body of the direction's thread. It returns when end() has been called and no work is left. If the
  // thread cannot get the device's context, every item fails with that reason.
  void run(WorkSource& source, int32_t lane);
  // Any thread may call wake() and end().
  void wake();
  void end();

 private:
  // Copies of one part that are enqueued on a stream together, with one mark after them.
  struct Portion {
    std::shared_ptr<ItemMove> move;
    std::shared_ptr<Part> part;
    uint32_t mark = 0;
    int64_t bytes = 0;
    bool by_kernel = false;
    bool stopped = false;
    std::shared_ptr<StreamEvent> fence;  // event of the inference engine's stream; null once it is reached
    Clock::time_point due;               // the portion is not expected to end before this time
  };
  struct Queue {
    std::unique_ptr<CopyStream> stream;
    std::deque<Portion> in_flight;
    std::shared_ptr<StreamEvent> waited_for;
    Clock::time_point last_end;
    bool went_on = false;  // whether another portion was in flight when the last one ended
    Clock::time_point last_query;
    // Unit: seconds per byte. The time per byte that recent portions took: [0] portions of the copy engine,
    // [1] portions of the kernel. 0 before the first measurement.
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
  std::string refused_;                         // why the thread has no context; empty if it has one
  mutable std::array<Queue, 2> queues_;         // [1]: layerwise loads; [0]: everything else
  std::list<std::shared_ptr<ItemMove>> moves_;  // items in flight, in the order in which they were taken
  struct Undigested {
    std::shared_ptr<ItemMove> move;
    std::shared_ptr<Part> part;
    size_t done = 0;  // number of the part's pages whose digests are computed
  };
  // Parts of stores whose bytes are in host memory, but whose digests are not computed yet.
  std::deque<Undigested> undigested_;
  std::vector<Copy> copies_;
  bool may_take_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> woken_{false};
  std::atomic<bool> ending_{false};
};

}  // namespace flexkv::cuda
