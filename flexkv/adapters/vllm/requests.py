"""The live requests: what the scheduler's side remembers of each from its first lookup to its end, and their block
tables, which it keeps from what the engine schedules in each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from flexkv.adapters.common.common_keys import COMMON
from flexkv.adapters.vllm.block_keys import BlockKeys, EngineBlockKeys, RequestNamespaces, TokenBlockKeys
from flexkv.adapters.vllm.input_names import InputNames
from flexkv.adapters.vllm.pool_geometry import PoolGeometry
from flexkv.adapters.vllm.request_fields import KeptOut, RequestFields
from flexkv.cache.base import MatchResult
from flexkv.facts.keys import Keys
from flexkv.transfer.graph import BlockIds, OpId

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from flexkv.adapters.vllm.stores import StoreMode


@dataclass(frozen=True, slots=True)
class Promise:
    """The last answer given to the engine for a request, if it was not "nothing".

    Attributes:
        tokens: promised beyond those that the engine had itself when it asked.
    """

    tokens: int
    match: MatchResult


@dataclass(slots=True, eq=False)
class BlockTable:
    """A request's blocks of one KV group.

    Attributes:
        keys: makes their keys.
        ids: the engine's blocks, in order, as it gave them; 0 where it gave none. A block that has left the window, and
            that the engine has taken back, still stands here.
        cursor: blocks before it are stored or being stored, or are not to be.
        has_pending: blocks behind it are certain and found no room yet.
    """

    keys: BlockKeys
    ids: list[int] = field(default_factory=list)
    cursor: int = 0
    has_pending: bool = False

    def blocks(self, first: int, end: int) -> BlockIds:
        """Engine block ids of blocks [first, end), int32."""
        return np.array(self.ids[first:end], dtype=np.int32)


@dataclass(slots=True, eq=False)
class RequestTracker:
    """One live request.

    Attributes:
        namespace: of all its keys, 32 bytes.
        tables: one per KV group, in the order of `PoolGeometry.groups`.
        kept_out: tokens that its caller keeps out of the cache.
        sampling: parameters of the piece of a streaming session that `kept_out` knows; vLLM replaces them.
        reached: tokens that its steps have computed so far, those that are not accepted among them.
        loading: op of the async load in flight, if any.
        stale: the KV held was computed with weights that have been replaced, or from a failed load that the engine did
            not take back; nothing of it may be stored.
        suspect_from: number of the first group's first block computed from a failed load and not computed again yet.
        own_from: number of the first group's first block that the engine's own prefix cache did not give.
        certain: tokens whose KV was certain after the last step that computed some of the request.
        reached_tokens: boundaries up to there have been stored or passed over; see `Boundaries`. With states, the last
            that was stored.
        states_at: the last boundary with which a step of the engine ended: its state is in the request's table.
        shared_tokens: how many leading tokens others had too, as far as the last lookup knows.
        counted: this admission's lookup is in the metrics.
        preemptions: of the request that its block table takes into account.
        supplied: tokens of its last load, by the number of the tier that supplied them.
        made_way: its load has waited a step already for stores of the blocks that it will be handed.
        unloadable: the engine has taken a promise and had no blocks for it: nothing more is promised.
    """

    request_id: str
    request: Request
    namespace: bytes
    tables: tuple[BlockTable, ...]
    kept_out: KeptOut
    sampling: SamplingParams | None
    reached: int = 0
    promise: Promise | None = None
    loading: OpId | None = None
    stale: bool = False
    suspect_from: int | None = None
    own_from: int = 0
    certain: int = 0
    reached_tokens: int = 0
    states_at: int = 0
    shared_tokens: int = 0
    counted: bool = False
    preemptions: int = 0
    supplied: tuple[int, ...] = ()
    made_way: bool = False
    unloadable: bool = False

    def keys(self) -> list[Keys]:
        """Per group, of all whole blocks whose tokens are known."""
        return [table.keys.keys() for table in self.tables]

    @property
    def block_ids(self) -> list[int]:
        """The engine's blocks of the first group, in order: of an engine that is not hybrid, all."""
        return self.tables[0].ids

    @property
    def block_keys(self) -> BlockKeys:
        """Makes the keys of the first group's blocks."""
        return self.tables[0].keys

    def restart(self) -> None:
        """The engine took all blocks away; the request starts again with others."""
        for table in self.tables:
            # A new list: the old one may still be looked at.
            table.ids = []
            table.cursor = 0
            table.has_pending = False
        self.stale = False
        self.suspect_from = None
        self.certain = 0
        self.reached_tokens = 0
        self.states_at = 0
        self.counted = False
        self.made_way = False


class RequestTable:
    """Every request from its first lookup to its end.

    Args:
        scheme: `keys.scheme`.
        names: of the engine's images and other inputs.
        adapters: see `RequestNamespaces`.

    Attributes:
        live: the trackers by request id.
    """

    def __init__(
        self,
        namespace: bytes,
        geometry: PoolGeometry,
        scheme: str,
        names: InputNames,
        adapters: Mapping[str, Any],
        fields: RequestFields,
    ) -> None:
        self._names = names
        self._namespaces = RequestNamespaces(namespace, adapters)
        self._groups = geometry.groups
        self._signatures = [group.signature for group in geometry.kv_groups()]
        self._fields = fields
        self._keys = TokenBlockKeys if scheme == COMMON else EngineBlockKeys
        self.live: dict[str, RequestTracker] = {}

    def of(self, request: Request) -> RequestTracker:
        """The request's tracker; a new one where there is none."""
        tracker = self.live.get(request.request_id)
        if tracker is None:
            namespace = self._namespaces.of(request)
            tables = tuple(
                BlockTable(
                    self._keys(request, of_group, group.block_tokens, group.hashes_per_block, self._names)
                )
                for group, of_group in zip(
                    self._groups, self._namespaces.of_groups(namespace, self._signatures), strict=True
                )
            )
            tracker = RequestTracker(
                str(request.request_id), request, namespace, tables, KeptOut(), request.sampling_params
            )
            tracker.kept_out.ask(bool(self._fields.skip_save(request)), 0, 0)
            self.live[request.request_id] = tracker
        return tracker

    def begin_lookup(self, tracker: RequestTracker, preempted: Callable[[RequestTracker], None]) -> None:
        """The engine asks what is cached of the request, so the request holds no block any more.

        After a reset with running requests the engine asks before a step names the preempted ones.

        Args:
            preempted: takes a request that has lost its blocks, while the tracker still knows them.
        """
        if tracker.block_ids:
            _lose(tracker, preempted)
        tracker.preemptions = tracker.request.num_preemptions

    def follow(
        self, output: SchedulerOutput, stores: StoreMode, preempted: Callable[[RequestTracker], None]
    ) -> None:
        """Keeps the block tables: O(new blocks).

        Args:
            stores: called for each request that gets new blocks.
            preempted: called for each request that loses its blocks, while the tracker still knows them.
        """
        for request_id in output.preempted_req_ids or ():
            tracker = self.live.get(request_id)
            # A lookup may have come before the step that names the preemption: the table is then of other blocks.
            if tracker is not None and tracker.preemptions != tracker.request.num_preemptions:
                _lose(tracker, preempted)
        for new in output.scheduled_new_reqs:
            if tracker := self.live.get(new.req_id):
                self._start(tracker, new.block_ids, stores)
        cached = output.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if blocks is None:
                continue
            if tracker := self.live.get(request_id):
                if request_id in cached.resumed_req_ids:
                    self._start(tracker, blocks, stores)
                else:
                    self._extend(tracker, blocks)
        for request_id, tokens in output.num_scheduled_tokens.items():
            if tracker := self.live.get(request_id):
                self._reach(tracker, tokens)

    def _reach(self, tracker: RequestTracker, scheduled_tokens: int) -> None:
        """Notes what the step computes of the request, and what a piece of a session asks that begins with it. A piece
        that says nothing goes on as the one before."""
        request = tracker.request
        computed = request.num_computed_tokens
        if request.sampling_params is not tracker.sampling:
            tracker.sampling = request.sampling_params
            asked = self._fields.skip_save(request)
            if asked is not None:
                tracker.kept_out.ask(asked, computed, max(computed, tracker.reached))
        tracker.reached = max(tracker.reached, computed + scheduled_tokens)

    def _start(self, tracker: RequestTracker, blocks: Sequence[Sequence[int]], stores: StoreMode) -> None:
        """The request begins, or begins again, with these blocks."""
        # What was loaded before a reset is still there; only losing the blocks ends that.
        stale = tracker.stale
        tracker.restart()
        tracker.stale = stale
        self._extend(tracker, blocks)
        stores.started(tracker)

    def _extend(self, tracker: RequestTracker, blocks: Sequence[Sequence[int]]) -> None:
        for table, group in zip(tracker.tables, self._groups, strict=True):
            table.ids.extend(blocks[group.number])


def _lose(tracker: RequestTracker, preempted: Callable[[RequestTracker], None]) -> None:
    """The engine has taken the request's blocks."""
    preempted(tracker)
    tracker.restart()
    tracker.preemptions = tracker.request.num_preemptions
