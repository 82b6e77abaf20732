"""A unit with a remote tier, in which the test takes the place of an engine. The bytes of every page are derived from
its key."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexkv.c_ext import run_digest
from flexkv.cache.base import MatchResult
from flexkv.cache.tiers.remote.tier import RemoteTier
from flexkv.config import load_config
from flexkv.facts.keys import Keys, Rule
from flexkv.facts.ranks import GroupFacts, KvGroup, RankFacts, UnitOwner
from flexkv.remote.plane import RemotePlane
from flexkv.transfer.graph import OpKind, OpResult, OpStatus
from flexkv.unit.base import CacheRole
from flexkv.unit.build import build_unit
from flexkv.unit.live_unit import LiveUnit
from flexkv.weights.files import NAMED, WeightsContent

BLOCK_TOKENS = 4
DEADLINE_S = 60.0
NAMESPACE = b"n" * 32
ONE_GROUP = (KvGroup(BLOCK_TOKENS),)
TWO_GROUPS = (
    KvGroup(BLOCK_TOKENS, signature=b"full"),
    KvGroup(BLOCK_TOKENS, Rule.WINDOW, 2, signature=b"window"),
)


@dataclass(frozen=True)
class Shape:
    """The KV groups, ranks and runs of a unit. By default it has two ranks, and runs whose sizes are not multiples of a
    disk sector.
    """

    groups: tuple[KvGroup, ...] = ONE_GROUP
    ranks: int = 2
    runs: tuple[int, ...] = (1000, 3000, 700)

    @property
    def stripe_bytes(self) -> int:
        return sum(self.runs)

    def facts(self) -> dict[int, RankFacts]:
        offsets = np.cumsum((0, *self.runs[:-1]))
        table = np.array([offsets, self.runs, range(len(self.runs))], np.int64).T.copy()
        groups = tuple(GroupFacts(self.stripe_bytes, table, "a format") for _ in self.groups)
        return {rank: RankFacts(rank, 0, 4096, groups) for rank in range(self.ranks)}


def chain(seed: object, blocks: int, group: int = 0) -> Keys:
    """Returns the keys of the first `blocks` blocks of the prompt `seed`: uint8 [blocks, 16]."""
    rows = [hashlib.sha256(f"{seed}/{group}/{block}".encode()).digest()[:16] for block in range(blocks)]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(-1, 16).copy()


def page_bytes(key: bytes, rank: int, size: int) -> NDArray[np.uint8]:
    seed = int.from_bytes(hashlib.sha256(key + bytes([rank])).digest()[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


class RemoteUnit:
    """A unit with a remote tier, and methods that make the calls of an engine.

    Args:
        url: URL of the store.
        settings: further settings, with `__` in place of the dot in their names.
    """

    def __init__(
        self,
        url: str,
        shape: Shape = Shape(),
        namespace: bytes = NAMESPACE,
        host_bytes: int = 4 << 20,
        weights: WeightsContent = NAMED,
        **settings: object,
    ) -> None:
        self.shape = shape
        values = {"host.bytes": host_bytes, "host.huge_pages": "off", "remote.urls": url}
        # on a busy machine, the store's answer may take longer than the default
        values["remote.probe_s"] = 2.0
        config = load_config(values | {k.replace("__", "."): v for k, v in settings.items()}, {})
        self.unit: LiveUnit = build_unit(
            config,
            shape.groups,
            shape.facts(),
            UnitOwner("a model", namespace, "unit0", weights),
            CacheRole(recomputes=True),
        )
        self.unit.grow()
        while self.unit.growing:
            self.unit.grow()
        self.manager = self.unit.manager
        self._requests = 0

    # --- access to parts of the unit ---

    @property
    def tier(self) -> RemoteTier:
        (tier,) = (tier for tier in self.manager.tiers if isinstance(tier, RemoteTier))
        return tier

    @property
    def plane(self) -> RemotePlane:
        plane = self.tier.plane
        assert isinstance(plane, RemotePlane)
        return plane

    @property
    def helper_pid(self) -> int:
        process = self.plane.link._process
        assert process is not None
        return process.pid

    def stripe(self, group: int, slot: int, rank: int) -> NDArray[np.uint8]:
        start = self.unit.places[rank][group].stripe
        return self.unit.pool.slot(slot)[start : start + self.shape.stripe_bytes]

    def digests(self, group: int, slot: int, rank: int) -> NDArray[np.uint64] | None:
        """Returns the digests of the runs of one rank's stripe in a page's slot, as uint64 that the caller can write.
        Returns None if ranks make no digests."""
        start = self.unit.places[rank][group].digests
        if start is None:
            return None
        return self.unit.pool.slot(slot)[start : start + 8 * len(self.shape.runs)].view(np.uint64)

    def made_digests(self, group: int, slot: int, rank: int) -> NDArray[np.uint64]:
        runs = np.split(self.stripe(group, slot, rank), np.cumsum(self.shape.runs)[:-1])
        return np.array([run_digest(run) for run in runs], np.uint64)

    # --- what an engine does ---

    def poll_until(self, done: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
        ends_s = time.monotonic() + deadline_s
        while not done():
            assert time.monotonic() < ends_s, f"not within {deadline_s:.0f} s: {what}"
            self.unit.poll()
            time.sleep(0.001)

    def settle(self) -> None:
        """Polls until no op of the unit is in flight."""
        self.poll_until(lambda: not self.unit.busy, "the tiers come to rest")

    def up(self, deadline_s: float = DEADLINE_S) -> None:
        self.poll_until(lambda: not self.tier.down, f"the tier heals: {self.tier.down}", deadline_s)

    def store(self, keys: Keys, group: int = 0, tokens: int | None = None) -> int:
        """Stores the pages of `keys` in host memory, as every rank would. Returns how many of the pages are new."""
        plan = self.manager.begin_store("store", group, keys, np.arange(len(keys), dtype=np.int32), 0, tokens)
        if plan.graph is None:
            return 0
        (op,) = plan.graph.ops
        for slot, key in zip(op.slots.tolist(), keys[plan.stored], strict=True):
            for rank in range(self.shape.ranks):
                self.stripe(group, slot, rank)[:] = page_bytes(key.tobytes(), rank, self.shape.stripe_bytes)
                if (digests := self.digests(group, slot, rank)) is not None:
                    digests[:] = self.made_digests(group, slot, rank)
        for rank in range(self.shape.ranks):
            self.manager.complete(rank, OpResult(op.op_id, OpStatus.OK, np.empty(0, np.int32)))
        self.manager.release("store")
        return len(plan.stored)

    def match(self, keys: Sequence[Keys], request_id: str | None = None) -> tuple[str, MatchResult]:
        """Looks up a request as vLLM does: it repeats the lookup as long as flexkv answers that the request should
        wait. Returns the request id and the result."""
        if request_id is None:
            self._requests += 1
            request_id = f"request {self._requests}"
        ends_s = time.monotonic() + DEADLINE_S
        while True:
            result = self.manager.match(request_id, keys, 0)
            self.unit.poll()
            if not result.reads:
                return request_id, result
            while self.manager.waits(request_id):
                assert time.monotonic() < ends_s, "a request waits for good"
                self.unit.poll()
                time.sleep(0.0005)

    def load(self, *keys: Keys) -> int:
        """Looks up a prompt, loads the promised blocks as every rank would, and compares all their bytes. Returns the
        number of tokens loaded."""
        request_id, result = self.match(keys)
        tokens = result.tokens
        if not tokens:
            self.manager.end_request(request_id)
            return 0
        targets = [np.arange(len(group.slots), dtype=np.int32) for group in result.groups]
        graph = self.manager.begin_load(request_id, targets)
        for op in graph.ops if graph is not None else ():
            assert op.kind is OpKind.H2D
            first = result.groups[op.group].first_block
            for position, slot in zip(op.blocks.tolist(), op.slots.tolist(), strict=True):
                key = keys[op.group][first + position].tobytes()
                for rank in range(self.shape.ranks):
                    wanted = page_bytes(key, rank, self.shape.stripe_bytes)
                    assert np.array_equal(self.stripe(op.group, slot, rank), wanted), "a wrong byte"
                    if (digests := self.digests(op.group, slot, rank)) is not None:
                        assert np.array_equal(digests, self.made_digests(op.group, slot, rank))
            for rank in range(self.shape.ranks):
                self.manager.complete(rank, OpResult(op.op_id, OpStatus.OK, np.empty(0, np.int32)))
        self.manager.end_request(request_id)
        return tokens

    def lose_host(self) -> None:
        """Evicts all pages from host memory, so that it is empty as in a new process."""
        index = self.manager.hub.index
        self.manager.hub.evict(0, index.up_slots(0))

    def check_no_leaks(self) -> None:
        """Waits until no op is in flight, then asserts that no slot is leased or lost."""
        self.settle()
        self.manager.check_integrity()
        index = self.manager.hub.index
        self.lose_host()
        assert index.free_slots(0) == index.up_slots(0), "slots were lost"

    def close(self) -> bool:
        return self.unit.close()
