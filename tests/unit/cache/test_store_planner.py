"""Shows which blocks the planner of stores offers to the cache manager, and when. The tests use a minimal engine,
without any real engine's classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from flexkv.cache.keys import EngineKeyChain, tail_key
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.stores.base import (
    GROUP,
    BlockTable,
    HeldBlocks,
    PoolBlock,
    StoreParts,
    StoreRequest,
    StoreWatch,
)
from flexkv.cache.stores.eager import EagerStores
from flexkv.cache.stores.kept_out import KeptOut
from flexkv.cache.stores.lazy import LazyStores
from flexkv.cache.stores.planner import RequestStores, StorePlanner
from flexkv.config import load_config
from flexkv.facts.keys import Keys, Rule
from flexkv.facts.request_settings import RequestSettings
from flexkv.observe import Counters
from flexkv.transfer.graph import TransferGraph
from tests.unit.cache.host_world import end, hit, make

BLOCK = 4
NAMESPACE, OTHER = bytes(32), bytes([1] * 32)


def hash_of(tokens: Sequence[int]) -> bytes:
    return repr(tuple(tokens)).encode().ljust(32, b".")[-32:]


def hashes_of(tokens: Sequence[int]) -> list[bytes]:
    return [hash_of(tokens[: at + BLOCK]) for at in range(0, len(tokens) - BLOCK + 1, BLOCK)]


def keys_of(tokens: Sequence[int], namespace: bytes = NAMESPACE) -> Keys:
    chain = EngineKeyChain(namespace, GROUP)
    chain.extend(hashes_of(tokens))
    return chain.keys


@dataclass
class TokenKeys:
    tokens: list[int]

    def keys(self) -> Keys:
        return keys_of(self.tokens)


@dataclass(slots=True, eq=False)
class Request(StoreRequest):
    tokens: list[int]
    namespace: bytes = NAMESPACE
    generated: int = 0
    """Number of generated tokens at the end of `tokens`. The tokens before them are the prompt."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.tokens) - self.generated

    @property
    def leading_shared(self) -> int:
        return 0

    def tail_key(self, tokens: int) -> Keys | None:
        block = tokens // BLOCK
        parent = hashes_of(self.tokens)[block - 1] if block else None
        return tail_key(NAMESPACE, GROUP, parent, b"", self.tokens[block * BLOCK : tokens], block)

    @property
    def has_own_names(self) -> bool:
        return self.namespace != NAMESPACE

    def key_part(self, block: int, block_hash: bytes) -> tuple[bytes, bytes]:
        return self.namespace, block_hash


class Pool(StoreWatch):
    """An engine's pool. Its free blocks keep their content until they are reused, in the order of `free`."""

    def __init__(self) -> None:
        super().__init__()
        self.hash_by_block: dict[int, bytes] = {}
        self.free: list[int] = []
        self.held: list[HeldBlocks] = []

    def hash_of(self, block: int) -> bytes | None:
        return self.hash_by_block.get(block)

    def hashes(self) -> dict[int, bytes]:
        return dict(self.hash_by_block)

    @property
    def free_head(self) -> tuple[int, int]:
        return (self.free[0] if self.free else -1, len(self.free))

    def free_blocks(self, count: int) -> list[PoolBlock]:
        return self.whole_blocks(self.free[:count])

    def whole_blocks(self, block_ids: Sequence[int]) -> list[PoolBlock]:
        return [PoolBlock(b, self.hash_by_block[b]) for b in block_ids if b in self.hash_by_block]

    def hold(self, block_ids: Sequence[int]) -> HeldBlocks:
        self.held.append(HeldBlocks(block_ids))
        return self.held[-1]

    def still_held(self, block_ids: Sequence[int]) -> int:
        return len(block_ids)

    def hand_out(self, block: int) -> None:
        self.free.remove(block)
        del self.hash_by_block[block]
        for held in self.held:
            held.lost |= {block} & set(held.block_ids)


@dataclass(frozen=True, slots=True)
class Group:
    block_tokens: int = BLOCK
    rule: Rule = Rule.FULL
    reach: int = 0


class NoBlocks:
    def blocks(self, request_id: str) -> None:
        return None

    def states(self, request_id: str) -> Iterable[tuple[int, int, int]]:
        return ()


@dataclass
class Orders:
    early: list[TransferGraph] = field(default_factory=list)
    stores: list[TransferGraph] = field(default_factory=list)
    settled: list[TransferGraph] = field(default_factory=list)

    @property
    def all(self) -> list[TransferGraph]:
        return [*self.early, *self.stores, *self.settled]


class Engine:
    """A minimal engine with one KV group of full attention."""

    def __init__(
        self,
        kind: type[RequestStores],
        slots: int = 16,
        before: dict[int, bytes] | None = None,
        **settings: Any,
    ) -> None:
        self.manager: LocalCacheManager = make(slots)
        self.pool, self.counters = Pool(), Counters()
        self.pool.hash_by_block.update(before or {})
        named = {f"store.{name}": value for name, value in settings.items()}
        config = load_config(named, {})
        parts = StoreParts(
            self.manager,
            self.pool,
            self.counters,
            None,
            [Group()],
            BLOCK,
            states_handed_over=False,
            namespace=NAMESPACE,
            settings=config.store,
            queue_ops=64,
            slots=slots,
            has_tiers=False,
            is_busy=lambda: False,
            step_tokens=8,
        )
        self.stores: StorePlanner = kind(parts)

    def start(self, name: str, tokens: Sequence[int], first_block: int) -> Request:
        ids = list(range(first_block, first_block + -(-len(tokens) // BLOCK)))
        request = Request(name, (BlockTable(TokenKeys(list(tokens)), ids),), KeptOut(), list(tokens))
        self.pool.hash_by_block.update(zip(ids, hashes_of(tokens), strict=False))
        self.stores.started(request)
        return request

    def step(self, *computed: tuple[Request, int]) -> list[int]:
        """Runs a step that computes each request up to the given number of tokens. Returns the blocks that the step
        stores.
        """
        for request, tokens in computed:
            request.computed, request.step_end, request.certain = request.certain, tokens, tokens
        orders = Orders()
        self.stores.plan_step([request for request, _ in computed], NoBlocks(), orders, idle=not computed)
        return self.carry_out(orders.all)

    def finish(self, request: Request) -> list[int]:
        graphs = self.stores.ended(request)
        self.pool.free += reversed(request.block_ids)
        return self.carry_out(graphs)

    def carry_out(self, graphs: Iterable[TransferGraph]) -> list[int]:
        ops = [op for graph in graphs for op in graph.ops]
        for op in ops:
            end(self.manager, op.op_id)
            self.pool.end(op.op_id)
        return [block for op in ops for block in op.blocks.tolist()]

    def lost(self, reason: str) -> float:
        return self.counters.value("flexkv_dropped_store_pages_total", reason=reason)


def test_blocks_are_stored_as_they_become_certain() -> None:
    engine, tokens = Engine(EagerStores), range(10)
    request = engine.start("one", tokens, 50)
    assert engine.step((request, 6)) == [50]
    assert engine.step((request, 10)) == [51]
    assert engine.finish(request) == []
    assert hit(engine.manager, keys_of(tokens)) == 2


@pytest.mark.parametrize("together", [1, 3])
def test_generated_blocks_are_stored_some_at_a_time(together: int) -> None:
    """Generated blocks are stored `generated_blocks` at a time. The first block with generated tokens also contains the
    prompt's last tokens.
    """
    engine, tokens = Engine(EagerStores, generated_blocks=together), range(29)
    request = engine.start("one", tokens, 50)
    request.generated = 29 - 6
    assert engine.step((request, 6)) == [50]
    stored = [engine.step((request, end)) for end in range(7, 30)]
    if together == 1:
        assert stored[1::4] == [[51], [52], [53], [54], [55], [56]]
        assert engine.finish(request) == []
    else:
        assert [blocks for blocks in stored if blocks] == [[51, 52, 53], [54, 55, 56]]
        assert engine.finish(request) == []
    assert hit(engine.manager, keys_of(tokens)) == 7


def test_generated_blocks_that_wait_are_stored_at_the_end() -> None:
    engine, tokens = Engine(EagerStores, generated_blocks=3), range(16)
    request = engine.start("one", tokens, 50)
    request.generated = 12
    assert engine.step((request, 4)) == [50]
    assert engine.step((request, 12)) == []
    assert engine.step((request, 13)) == []
    assert engine.finish(request) == [51, 52]
    assert hit(engine.manager, keys_of(tokens)) == 3


def test_generated_blocks_without_room_do_not_wait_for_more() -> None:
    engine = Engine(EagerStores, slots=4, generated_blocks=3)
    leased = engine.start("leased", range(100, 116), 90)
    assert engine.step((leased, 16)) == [90, 91, 92, 93]
    engine.manager.match("reader", [keys_of(range(100, 116))], 0)  # leases all slots for another request
    request = engine.start("one", range(16), 50)
    request.generated = 16
    assert engine.step((request, 12)) == []
    engine.manager.release("reader")
    assert engine.step((request, 13)) == [50, 51, 52]


def test_what_waits_is_lost_by_a_preemption_and_counted() -> None:
    engine = Engine(EagerStores, generated_blocks=3)
    request = engine.start("one", range(16), 50)
    request.generated = 12
    assert engine.step((request, 4)) == [50]
    assert engine.step((request, 12)) == []
    engine.stores.preempted(request)
    assert engine.lost("preempted") == 2


def test_a_tail_is_stored_at_the_end() -> None:
    engine, tokens = Engine(EagerStores, partial_blocks=True), range(10)
    request = engine.start("one", tokens, 50)
    assert engine.step((request, 10)) == [50, 51]
    assert engine.finish(request) == [52]


def test_a_tail_that_the_limit_cuts_is_not_stored() -> None:
    """A partial tail is not stored if the request's limit of stored tokens ends within the tail, because the tail's
    block has tokens beyond the limit.
    """
    for limit, stored in ((6, [50]), (9, [50, 51]), (11, [50, 51, 52])):
        engine = Engine(EagerStores, partial_blocks=True)
        request = engine.start("one", range(10), 50)
        request.settings = RequestSettings(max_store_tokens=limit)
        first = engine.step((request, request.storable(10)))
        assert first + engine.finish(request) == stored, limit


def test_what_the_caller_keeps_out_is_not_stored() -> None:
    engine = Engine(EagerStores)
    request = engine.start("one", range(16), 50)
    request.kept_out.ask(True, 5, 5)
    request.kept_out.ask(False, 7, 7)
    assert engine.step((request, 16)) == [50, 52, 53]


def test_blocks_without_room_wait_and_are_lost_when_the_engine_takes_them() -> None:
    engine = Engine(EagerStores, slots=2)
    leased = engine.start("leased", range(100, 108), 90)
    assert engine.step((leased, 8)) == [90, 91]
    engine.manager.match("reader", [keys_of(range(100, 108))], 0)  # leases both slots for another request
    request = engine.start("one", range(8), 50)
    assert engine.step((request, 8)) == []
    assert engine.finish(request) == []
    assert len(engine.stores.holds or ()) == 1
    engine.pool.hand_out(51)
    engine.manager.release("reader")
    assert engine.step() == [50]
    assert engine.lost("reused") == 1


def test_control_without_holds_they_are_lost_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(EagerStores, slots=2)
    leased = engine.start("leased", range(100, 108), 90)
    engine.step((leased, 8))
    engine.manager.match("reader", [keys_of(range(100, 108))], 0)
    request = engine.start("one", range(8), 50)
    engine.step((request, 8))
    assert engine.stores.holds is not None
    monkeypatch.setattr(engine.stores.holds, "begin", lambda *_: None)
    engine.finish(request)
    engine.manager.release("reader")
    assert engine.step() == []


def test_lazy_stores_take_what_the_engine_hands_out_next() -> None:
    engine = Engine(LazyStores)
    request = engine.start("one", range(16), 50)
    assert engine.step((request, 16)) == []
    engine.pool.free = [7, 8, 9, 10]  # blocks without content
    assert engine.finish(request) == []
    assert engine.step() == []
    for block in (7, 8):
        engine.pool.free.remove(block)
    assert engine.step() == [52, 53]
    assert hit(engine.manager, keys_of(range(16))) == 0, "the first blocks are still in the engine"


@pytest.mark.parametrize("counts", [True, False])
def test_what_the_engine_drops_before_it_is_stored_is_counted(
    monkeypatch: pytest.MonkeyPatch, counts: bool
) -> None:
    """Blocks that the engine's reset drops before they are stored are counted as missed. The connector is not notified
    of this reset. In the control the planner does not record the blocks, so it counts none.
    """
    if not counts:
        monkeypatch.setattr(LazyStores, "_note_left", lambda *_: None)
    engine = Engine(LazyStores)
    request = engine.start("one", range(16), 50)
    engine.step((request, 16))
    engine.pool.free = list(range(1, 9))  # blocks without content, ahead of the request's
    assert engine.finish(request) == []
    assert engine.step() == []
    engine.pool.hash_by_block.clear()
    assert engine.step() == []
    assert engine.counters.value("flexkv_lazy_missed_pages_total") == (4 if counts else 0)
    engine.step()
    assert engine.counters.value("flexkv_lazy_missed_pages_total") == (4 if counts else 0), "once"


def test_what_is_stored_before_the_engine_drops_it_is_not_counted() -> None:
    engine = Engine(LazyStores)
    request = engine.start("one", range(16), 50)
    engine.step((request, 16))
    stored = engine.finish(request) + engine.step()
    assert sorted(stored) == [50, 51, 52, 53]
    engine.pool.hash_by_block.clear()
    engine.step()
    assert engine.counters.value("flexkv_lazy_missed_pages_total") == 0


def test_lazy_stores_leave_blocks_whose_content_is_not_certain() -> None:
    engine = Engine(LazyStores)
    request = engine.start("one", range(16), 50)
    assert engine.step((request, 5)) == []
    engine.stores.preempted(request)
    engine.pool.free = list(request.block_ids)
    assert engine.step() == [50]


def test_control_a_hash_alone_does_not_prove_content(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LazyStores, "_suspect", lambda *_: None)
    engine = Engine(LazyStores)
    request = engine.start("one", range(16), 50)
    engine.step((request, 5))
    engine.stores.preempted(request)
    engine.pool.free = list(request.block_ids)
    assert engine.step() == [53, 52, 51, 50]


def left_by(engine: Engine, name: str, namespace: bytes, found: int = 0) -> list[int]:
    """Runs a request of two blocks, of which it finds `found` in the engine's own cache. Returns the blocks that are
    stored at the request's end.
    """
    engine.pool.free.clear()  # from this line on, the engine has reused its free blocks
    request = engine.start(name, range(8), 50)
    request.namespace, request.own_from = namespace, found
    engine.step((request, 8))
    return engine.finish(request)


def test_a_blocks_namespace_is_that_of_the_request_that_computed_it() -> None:
    engine = Engine(LazyStores)
    assert left_by(engine, "apart", OTHER) == [50, 51]
    assert hit(engine.manager, keys_of(range(8))) == 0
    assert left_by(engine, "plain", NAMESPACE) == [50, 51]
    assert hit(engine.manager, keys_of(range(8))) == 2
    assert left_by(engine, "apart again", OTHER) == [], "its pages are there"
    assert hit(engine.manager, keys_of(range(8), OTHER)) == 2


def test_a_request_that_finds_blocks_in_the_engines_cache_does_not_name_them_anew() -> None:
    engine = Engine(LazyStores)
    assert left_by(engine, "plain", NAMESPACE) == [50, 51]
    assert left_by(engine, "apart", OTHER, found=2) == []
    assert engine.step() == []
    assert hit(engine.manager, keys_of(range(8), OTHER)) == 0


def test_what_was_computed_before_there_was_a_planner_is_not_stored() -> None:
    before = dict(zip((50, 51), hashes_of(range(8)), strict=True))
    engine = Engine(LazyStores, before=before)
    engine.pool.free = [50, 51]
    assert engine.step() == []


def test_after_a_reset_lazy_stores_take_only_blocks_that_requests_have_left() -> None:
    """Other free blocks may have KV of replaced weights, until the engine's pool was empty."""
    engine = Engine(LazyStores)
    engine.stores.reset({})
    unknown = dict(zip((60, 61), hashes_of(range(40, 48)), strict=True))
    engine.pool.hash_by_block.update(unknown)
    engine.pool.free = [60, 61]
    assert engine.step() == []
    request = engine.start("one", range(8), 50)
    engine.step((request, 8))
    assert sorted(engine.finish(request) + engine.step()) == [50, 51]
    engine.stores.pool_emptied()
    engine.pool.hash_by_block.clear()
    engine.pool.hash_by_block.update(unknown)
    engine.pool.free = [61, 60]
    assert engine.step() == [60, 61]


@pytest.mark.parametrize("fails", [True, False])
def test_after_a_reset_blocks_of_a_failed_load_are_not_offered_again(fails: bool) -> None:
    """The blocks could not be stored when their request ended. Before the next attempt, they prove to be bad."""
    engine = Engine(LazyStores)
    engine.stores.reset({})
    stores = engine.stores
    assert isinstance(stores, LazyStores)
    blocks = dict(zip((50, 51), hashes_of(range(8)), strict=True))
    engine.pool.hash_by_block.update(blocks)
    stores._pass_over([PoolBlock(number, block_hash) for number, block_hash in blocks.items()])
    if fails:
        stores.load_failed([50, 51])
    engine.pool.free = [51, 50]
    assert engine.step() == ([] if fails else [50, 51])


@pytest.mark.parametrize("kind", [EagerStores, LazyStores])
def test_nothing_of_replaced_weights_is_stored(kind: type[RequestStores]) -> None:
    engine = Engine(kind)
    request = engine.start("one", range(8), 50)
    engine.stores.reset(dict(engine.pool.hash_by_block))
    taker = engine.start(
        "two", range(8), 50
    )  # the second request shares the first one's blocks through the engine's own cache
    assert taker.stale
    engine.step((taker, 8))
    engine.finish(taker)
    engine.step()
    assert hit(engine.manager, keys_of(range(8))) == 0
    assert not request.stale


def test_a_planner_that_stores_nothing_answers_every_call() -> None:
    planner, none = StorePlanner(), np.empty(0, np.int32)
    request = Request("one", (BlockTable(TokenKeys([1] * 8), [1, 2]),), KeptOut(), [1] * 8)
    orders = Orders()
    planner.plan_step([request], NoBlocks(), orders, idle=False)
    planner.started(request)
    planner.preempted(request)
    planner.load_failed([1])
    planner.load_kept(request, 0)
    planner.unpublished(none)
    planner.reset({})
    assert planner.ended(request) == []
    assert planner.plan_before_load(3) is None
    assert orders.all == []
