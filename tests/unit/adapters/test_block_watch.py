"""flexkv watches the blocks of stores in flight, so that it notices when vLLM's block pool allocates one of them again.
The tests use vLLM's own pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flexkv.adapters.vllm.store_watch import BlockWatch
from flexkv.transfer.graph import OpId
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.vllm_objects import BLOCK_TOKENS, make_pool, make_request

OP, OTHER = OpId(7), OpId(8)


def ids(blocks) -> np.ndarray:
    return np.array([block.block_id for block in blocks], dtype=np.int32)


def test_watching_takes_no_reference_and_lets_the_cache_be_reset() -> None:
    pool = make_pool()
    watch = BlockWatch(pool, 0.5, BLOCK_TOKENS)
    blocks = pool.get_new_blocks(3)
    watch.add(OP, ids(blocks))
    assert [block.ref_cnt for block in blocks] == [1, 1, 1]
    assert pool.get_num_free_blocks() == 12
    pool.free_blocks(blocks)
    assert pool.get_num_free_blocks() == 15
    assert pool.reset_prefix_cache()


def test_a_block_handed_out_again_is_named_by_its_position() -> None:
    pool = make_pool(8)
    watch = BlockWatch(pool, 1.0, BLOCK_TOKENS)
    blocks = pool.get_new_blocks(3)
    watch.add(OP, ids(blocks))
    pool.free_blocks([blocks[1]])
    assert watch.take_reused() == {}
    again = pool.get_new_blocks(5)
    assert blocks[1] in again
    assert watch.take_reused() == {OP: [1]}
    assert watch.take_reused() == {}


def test_steps_that_hand_out_no_block_look_at_none() -> None:
    """If the pool allocates no block, `take_reused` looks at no watched block. The control shows that the test counts
    each look at a watched block.
    """

    class Counted(dict):  # type: ignore[type-arg]
        looks = 0

        def get(self, *key: Any) -> Any:
            Counted.looks += 1
            return super().get(*key)

    pool = make_pool(16)
    watch = BlockWatch(pool, 1.0, BLOCK_TOKENS)
    blocks = pool.get_new_blocks(4)
    pool.free_blocks(blocks)
    watch.add(OP, ids(blocks))
    pool._reuse_watchers = Counted(pool._reuse_watchers)
    assert watch.take_reused() == {}
    first, Counted.looks = Counted.looks, 0
    assert first >= len(blocks)
    assert watch.take_reused() == {}
    assert Counted.looks == 0
    pool.get_new_blocks(1)
    assert watch.take_reused() == {}
    assert Counted.looks >= len(blocks)


def test_a_reset_counts_as_reuse_because_the_pool_will_not_say_it_again() -> None:
    pool = make_pool()
    watch = BlockWatch(pool, 1.0, BLOCK_TOKENS)
    blocks = pool.get_new_blocks(2)
    watch.add(OP, ids(blocks))
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache()
    assert watch.take_reused() == {OP: [0, 1]}


def test_an_ended_store_is_not_named() -> None:
    pool = make_pool(8)
    watch = BlockWatch(pool, 1.0, BLOCK_TOKENS)
    blocks = pool.get_new_blocks(3)
    watch.add(OP, ids(blocks))
    watch.end(OP)
    pool.free_blocks(blocks)
    pool.get_new_blocks(7)
    assert watch.take_reused() == {}
    assert watch.room == 8


def test_the_share_bounds_what_no_request_holds() -> None:
    pool = make_pool(16)
    watch = BlockWatch(pool, 0.25, BLOCK_TOKENS)
    assert watch.room == 4
    watch.add(OP, ids(pool.get_new_blocks(3)))
    assert watch.room == 1
    watch.add(OTHER, ids(pool.get_new_blocks(6)), "one")
    assert watch.room == 1
    watch.release("one")
    assert watch.room == -5
    watch.end(OTHER)
    watch.end(OP)
    assert watch.room == 4


def test_a_store_that_ends_before_its_request_does_is_forgotten() -> None:
    pool = make_pool(16)
    watch = BlockWatch(pool, 0.25, BLOCK_TOKENS)
    watch.add(OP, ids(pool.get_new_blocks(3)), "one")
    watch.end(OP)
    watch.release("one")
    assert watch.room == 4
    assert not watch._ops_of_holder
    assert not watch._holder_of_op


def test_held_blocks_say_which_of_them_were_handed_out() -> None:
    """A hold on freed blocks reports which of them the pool has allocated again. Another hold on the same blocks, which
    has ended before, reports none. Beginning a store of a held block does not change the order of the engine's free
    queue.
    """
    pool = make_pool(8)
    watch = BlockWatch(pool, 1.0, BLOCK_TOKENS)
    blocks = pool.get_new_blocks(3)
    first, second = (watch.hold([block.block_id for block in blocks]) for _ in range(2))
    pool.free_blocks(blocks)
    assert watch.still_held(first.block_ids) == 3
    order = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    watch.add_held(OP, ids(blocks[:1]))
    assert [block.block_id for block in pool.free_block_queue.get_all_free_blocks()] == order
    watch.end_hold(second)
    assert blocks[0] in pool.get_new_blocks(5)
    assert first.lost == {block.block_id for block in blocks if block.ref_cnt}
    assert not first.was_reset
    assert not second.lost
    assert watch.still_held(first.block_ids) == 0
    assert watch.take_reused() == {OP: [0]}
    watch.end_hold(first)
    assert not watch._held


def test_held_blocks_say_that_the_pool_was_reset() -> None:
    pool = make_pool(8)
    watch = BlockWatch(pool, 1.0, BLOCK_TOKENS)
    blocks = pool.get_new_blocks(2)
    held = watch.hold([block.block_id for block in blocks])
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache()
    assert held.was_reset
    assert len(held.lost) == 2


def test_free_blocks_are_watched_without_moving_them_in_the_queue() -> None:
    pool = make_pool(8)
    request = make_request(range(12))
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(request, blocks, 0, 3, block_size=4, kv_cache_group_id=0)
    pool.free_blocks(reversed(blocks))
    order = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    watch = BlockWatch(pool, 1.0, BLOCK_TOKENS)
    watch.add_free(OP, ids(blocks))
    assert [block.block_id for block in pool.free_block_queue.get_all_free_blocks()] == order
    assert watch.take_reused() == {}
    # A prefix hit does not overwrite the block; only an allocation would.
    pool.touch([blocks[0]])
    assert watch.take_reused() == {}
    taken = pool.get_new_blocks(5)
    assert blocks[2] in taken
    assert blocks[0] not in taken
    assert watch.take_reused() == {OP: sorted(i for i, block in enumerate(blocks) if block in taken)}
    assert watch.take_reused() == {}


def test_a_watcher_that_was_there_before_is_called_too() -> None:
    pool = make_pool(8)
    blocks = pool.get_new_blocks(3)
    told: list[int] = []
    pool.touch(blocks)
    pool.unpin_blocks(blocks, lambda block: told.append(block.block_id))
    watch = BlockWatch(pool, 1.0, BLOCK_TOKENS)
    watch.add(OP, ids(blocks))
    watch.add(OP, ids(blocks))  # flexkv does not mistake its own first watch for another watcher
    pool.free_blocks([blocks[1]])
    pool.get_new_blocks(5)
    assert told == [blocks[1].block_id]
    assert watch.take_reused() == {OP: [1]}


def test_closing_leaves_the_pool_as_it_was() -> None:
    pool = make_pool(8)
    blocks = pool.get_new_blocks(3)
    told: list[int] = []
    pool.touch(blocks[:1])
    pool.unpin_blocks(blocks[:1], lambda block: told.append(block.block_id))
    before = dict(pool._reuse_watchers)
    watch = BlockWatch(pool, 1.0, BLOCK_TOKENS)
    watch.add(OP, ids(blocks))
    assert set(pool._reuse_watchers) == {block.block_id for block in blocks}
    watch.close()
    assert pool._reuse_watchers == before
    pool.free_blocks(blocks)
    pool.get_new_blocks(7)
    assert told == [blocks[0].block_id]


def test_a_watcher_that_takes_our_place_makes_the_block_count_as_handed_out() -> None:
    """A block counts as reused if another user replaces flexkv's callback on it. The pool has one callback per block,
    so flexkv can no longer learn when the block is reused.
    """
    pool = make_pool(8)
    blocks = pool.get_new_blocks(3)
    watch = BlockWatch(pool, 1.0, BLOCK_TOKENS)
    watch.add(OP, ids(blocks))
    assert watch.take_reused() == {}
    pool.touch(blocks[2:])
    pool.unpin_blocks(blocks[2:], lambda block: None)
    assert watch.take_reused() == {}
    pool.get_new_blocks(1)  # which block this allocates does not matter
    assert watch.take_reused() == {OP: [2]}
    assert watch.take_reused() == {}


def test_closing_an_engines_side_takes_its_watchers_off(make_engine: Callable[..., MiniEngine]) -> None:
    engine = make_engine()
    engine.add(make_request(range(23), "one"))
    engine.step()
    assert engine.pool._reuse_watchers
    engine.close()
    assert not engine.pool._reuse_watchers
