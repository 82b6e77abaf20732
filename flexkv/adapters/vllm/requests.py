"""The records of live requests on the scheduler's side. Each record is kept from the request's first lookup to its end.
It contains the request's block tables, which are updated from the engine's schedule of each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import get_block_hash

from flexkv.adapters.common.common_keys import COMMON
from flexkv.adapters.vllm.block_keys import (
    BlockKeys,
    EngineBlockKeys,
    RequestNamespaces,
    TokenBlockKeys,
    group_namespace,
    tail_extra,
)
from flexkv.adapters.vllm.engine_spec import EngineSpec
from flexkv.adapters.vllm.request_fields import RequestFields
from flexkv.cache.base import MatchResult
from flexkv.cache.keys import tail_key
from flexkv.cache.stores.base import GROUP, BlockTable, StoreRequest
from flexkv.cache.stores.kept_out import KeptOut
from flexkv.facts.keys import Keys
from flexkv.facts.request_settings import NO_SETTINGS, RequestSettings
from flexkv.transfer.graph import OpId

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class Promise:
    """The promise that the last lookup of a request gave the engine. It is for at least one token.

    Attributes:
        tokens: how many tokens were promised beyond those that the engine itself had at the lookup.
        match: the manager's result of the lookup.
    """

    tokens: int
    match: MatchResult


@dataclass(slots=True, eq=False)
class RequestTracker(StoreRequest):
    """The record of one live request.

    Attributes:
        request: the engine's record of the request.
        namespace: the namespace of the request's keys, 32 bytes, followed by a mark if the caller named a namespace;
            see `RequestNamespaces.of`.
        has_own_namespace: whether the namespace differs from the engine's, because the request has an adapter or its
            caller named a namespace.
        read_from: the sampling parameters from which `asked` was read. vLLM makes a new object for each piece of a
            streaming session.
        sampling: the sampling parameters of the last piece that was passed to `kept_out`.
        asked: the settings that the caller gave; in a streaming session those of its last piece.
        first_namespace: the namespace that the caller named when the request began, which is part of the request's
            keys; empty if the caller named none.
        reached: how many tokens the request's steps have computed so far, including tokens that were not accepted.
        promise: the last promise, if the engine has not loaded it yet; otherwise None.
        loading: the op of the async load in flight; None if there is none.
        shared_tokens: how many leading tokens other requests have in common with this one, according to the last
            lookup.
        counted: whether the metrics already include the lookup for this admission of the request.
        preemptions: how many preemptions of the request its block tables reflect.
        supplied: for each tier, by its number, how many tokens of the last load it supplied.
        made_way: whether the request's load has already waited one step while the old KV of the blocks that it will get
            was stored.
        unloadable: whether the engine took a promise without having blocks for it. flexkv then promises the request no
            more tokens.
        adapter_changed: whether the files of the request's adapter have changed since the adapter was first used.
            Nothing is then loaded or stored for the request any more.
    """

    request: Request
    namespace: bytes
    has_own_namespace: bool
    read_from: SamplingParams | None
    sampling: SamplingParams | None
    asked: RequestSettings = NO_SETTINGS
    first_namespace: str = ""
    reached: int = 0
    promise: Promise | None = None
    loading: OpId | None = None
    shared_tokens: int = 0
    counted: bool = False
    preemptions: int = 0
    supplied: tuple[int, ...] = ()
    made_way: bool = False
    unloadable: bool = False
    adapter_changed: bool = False

    def keys(self) -> list[Keys]:
        """Returns for each group the keys of all complete blocks whose tokens are known."""
        return [table.keys.keys() for table in self.tables]

    @property
    def block_keys(self) -> BlockKeys:
        """The object that makes the keys of the first group's blocks."""
        keys = self.tables[0].keys
        assert isinstance(keys, BlockKeys)
        return keys

    @property
    def prompt_tokens(self) -> int:
        return int(self.request.num_prompt_tokens)

    @property
    def leading_shared(self) -> int:
        return int(max(self.shared_tokens, self.request.shared_prefix_boundary))

    def tail_parts(self, block: int, end_token: int) -> tuple[bytes | None, bytes, list[int]] | None:
        """Returns the inputs of the key of a block's partial tail: the parent block's key, the tail's extra keys, and
        its tokens up to `end_token`. Returns None if the tail has no key."""
        keys = self.block_keys
        first = block * keys.block_tokens
        extra = tail_extra(self.request, first, end_token)
        if extra is None or block > len(keys.keys()):
            return None
        return keys.parent(block), extra, self.request.all_token_ids[first:end_token]

    def tail_key(self, tokens: int) -> Keys | None:
        keys = self.block_keys
        block = tokens // keys.block_tokens
        parts = self.tail_parts(block, tokens)
        return parts and tail_key(keys.namespace, GROUP, *parts, block)

    @property
    def has_own_names(self) -> bool:
        return self.has_own_namespace or self.block_keys.first_of_run() is not None

    def key_part(self, block: int, block_hash: bytes) -> tuple[bytes, bytes]:
        engine_key, first = bytes(get_block_hash(block_hash)), self.block_keys.first_of_run()
        if first is not None and block >= first:
            engine_key = self.block_keys.names.run + engine_key
        return self.namespace, engine_key

    def restart(self) -> None:
        """Resets the tracker after the engine has taken all the request's blocks. The request will start again with
        different blocks."""
        for table in self.tables:
            # The list is replaced, not cleared, because store operations in flight may still need the old list
            # (`Retired`).
            table.ids = []
            table.cursor = 0
            table.has_pending = False
        self.stale = self.adapter_changed
        self.suspect_from = None
        self.certain = 0
        self.reached_tokens = 0
        self.states_at = 0
        self.next_offer = 0
        self.counted = False
        self.made_way = False


OnRequest = Callable[[RequestTracker], None]
"""A function that is called with the tracker of a request whose block table changes."""


class RequestTable:
    """The trackers of all requests, each kept from the request's first lookup to its end.

    Attributes:
        live: the trackers, by request id.
    """

    def __init__(self, spec: EngineSpec, fields: RequestFields) -> None:
        self._names = spec.names
        self._namespaces = RequestNamespaces(spec.namespace, spec.adapters)
        self._groups = spec.geometry.groups
        self._signatures = [group.signature for group in spec.geometry.kv_groups()]
        self._fields = fields
        # With `store.tokens=prompt`, generated tokens never count as certain, so that they are not stored.
        self._prompt_only = spec.config.store.tokens == "prompt"
        self._keys = TokenBlockKeys if spec.config.keys.scheme == COMMON else EngineBlockKeys
        self.live: dict[str, RequestTracker] = {}

    def of(self, request: Request) -> RequestTracker:
        """Returns the request's tracker. Makes one if there is none."""
        tracker = self.live.get(request.request_id)
        if tracker is None:
            given = self._fields.given(request)
            settings = replace(NO_SETTINGS, **given) if given else NO_SETTINGS
            namespace = self._namespaces.of(request, settings.namespace)
            tables = self._tables(request, namespace)
            sampling = request.sampling_params
            tracker = RequestTracker(
                str(request.request_id),
                tables,
                KeptOut(),
                request,
                namespace,
                namespace != self._namespaces.engine,
                sampling,
                sampling,
                asked=settings,
                settings=settings,
                first_namespace=settings.namespace,
            )
            tracker.kept_out.ask(settings.skip_save, 0, 0)
            self.live[request.request_id] = tracker
        return tracker

    @property
    def have_adapters(self) -> bool:
        """Whether any request so far has had an adapter."""
        return self._namespaces.have_adapters

    def keys_of(self, request: Request) -> list[Keys]:
        """Returns, per KV group, the keys of the complete blocks of `request`, which need not be one of the engine's
        requests.
        """
        return [
            table.keys.keys()
            for table in self._tables(request, self._namespaces.of(request, NO_SETTINGS.namespace))
        ]

    def _tables(self, request: Request, namespace: bytes) -> tuple[BlockTable, ...]:
        tables = []
        for group, signature in zip(self._groups, self._signatures, strict=True):
            of_group = group_namespace(namespace, signature)
            keys = self._keys(request, of_group, group.block_tokens, group.hashes_per_block, self._names)
            tables.append(BlockTable(keys))
        return tuple(tables)

    def begin_lookup(self, tracker: RequestTracker, preempted: OnRequest) -> None:
        """Prepares the tracker of a request that the engine looks up. Such a request holds no engine blocks.

        If the tracker still has blocks, the request was preempted. After a reset with running requests, the engine may
        look up a preempted request before the step that reports the preemption.

        Args:
            preempted: called with the tracker of a preempted request, while the tracker still has the lost blocks.
        """
        if tracker.block_ids:
            _lose(tracker, preempted)
        tracker.preemptions = tracker.request.num_preemptions
        self.take_changed([tracker])
        self._read_piece(tracker)

    def take_changed(self, trackers: Iterable[RequestTracker]) -> list[RequestTracker]:
        """Checks whether the adapters of these requests have changed. Marks the requests for which this call has found
        a change, and returns them. Costs a few calls of `stat` per adapter.
        """
        looked: dict[str, bool] = {}
        changed = []
        for tracker in trackers:
            adapter = tracker.request.lora_request
            if adapter is None or tracker.adapter_changed:
                continue
            path = adapter.lora_path
            if path not in looked:
                looked[path] = self._namespaces.adapter_changed(path)
            if looked[path]:
                tracker.adapter_changed = tracker.stale = True
                tracker.promise = None
                changed.append(tracker)
        return changed

    def follow(
        self,
        output: SchedulerOutput,
        started: OnRequest,
        preempted: OnRequest,
    ) -> list[RequestTracker]:
        """Updates the block tables from a step's schedule, and records which tokens the step computes. Costs
        O(requests + new blocks).

        Args:
            started: called with the tracker of each request that gets a new block table.
            preempted: called with the tracker of each request that loses its blocks, while the tracker still has them.

        Returns:
            The trackers of the requests for which the step computes tokens.
        """
        for request_id in output.preempted_req_ids or ():
            tracker = self.live.get(request_id)
            # If a lookup came before this step, it has already handled the preemption, and the request may have new
            # blocks.
            if tracker is not None and tracker.preemptions != tracker.request.num_preemptions:
                _lose(tracker, preempted)
        for new in output.scheduled_new_reqs:
            if tracker := self.live.get(new.req_id):
                self._start(tracker, new.block_ids, started)
        cached = output.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if blocks is None:
                continue
            if tracker := self.live.get(request_id):
                if request_id in cached.resumed_req_ids:
                    self._start(tracker, blocks, started)
                else:
                    self._extend(tracker, blocks)
        scheduled = []
        for request_id, tokens in output.num_scheduled_tokens.items():
            if tracker := self.live.get(request_id):
                self._note_step(tracker, tokens)
                scheduled.append(tracker)
        return scheduled

    def _note_step(self, tracker: RequestTracker, scheduled_tokens: int) -> None:
        """Records which tokens a step computes, and how many are certain (computed and accepted) after its forward
        pass. If a new piece of a streaming session begins in this step, also records whether its tokens are kept out of
        the cache. A piece without that setting is treated like the previous piece.

        Prompt tokens that the step computes are certain, because they are known. Tokens that the step generates are not
        certain, and neither are drafts of earlier steps that the engine has not accepted yet.
        """
        request = tracker.request
        computed = request.num_computed_tokens
        if request.sampling_params is not tracker.sampling:
            tracker.sampling = request.sampling_params
            self._read_piece(tracker)
            tracker.kept_out.ask(tracker.settings.skip_save, computed, max(computed, tracker.reached))
        tracker.computed = computed
        tracker.step_end = end = computed + scheduled_tokens
        if end > tracker.reached:
            tracker.reached = end
        prompt = request.num_prompt_tokens
        if computed < prompt:
            certain = min(end, prompt)
        elif self._prompt_only:
            certain = prompt
        else:
            certain = min(computed - request.num_output_placeholders, request.num_tokens)
        # `storable` is skipped if there are no settings, because this method runs for each request in each step.
        tracker.certain = certain if tracker.settings is NO_SETTINGS else tracker.storable(certain)

    def note_end(self, tracker: RequestTracker) -> None:
        """Records how many tokens of an ended request are certain, so that their KV may be stored. Tokens of steps in
        flight do not count."""
        request = tracker.request
        # The difference may be negative: a preemption or a failed load reduces the computed tokens while their steps
        # are in flight.
        certain = min(max(0, request.num_computed_tokens - request.num_in_flight_tokens), request.num_tokens)
        if self._prompt_only:
            certain = min(certain, request.num_prompt_tokens)
        tracker.certain = tracker.storable(certain)

    def _read_piece(self, tracker: RequestTracker) -> None:
        """Reads the settings of a new piece, the next part of a streaming session's input, if there is one. Settings
        that the piece does not contain keep their values.

        All keys of a session are in the namespace of its first piece. So nothing is stored or loaded for a piece that
        names another namespace.
        """
        request = tracker.request
        if request.sampling_params is tracker.read_from:
            return
        tracker.read_from = request.sampling_params
        given = self._fields.given(request)
        if not given:
            return
        first, before = tracker.first_namespace, tracker.asked.ttl_s
        if before is not None and "ttl_s" in given:
            # The shorter time applies, because a block may contain tokens of this piece and of earlier ones.
            given["ttl_s"] = min(before, given["ttl_s"] or before)
        tracker.asked = tracker.settings = replace(tracker.asked, **given)
        if tracker.asked.namespace != first:
            tracker.settings = replace(tracker.asked, skip_save=True, skip_load=True)
            if "namespace" in given:
                self._fields.name_foreign(request, first)

    def _start(self, tracker: RequestTracker, blocks: Sequence[Sequence[int]], started: OnRequest) -> None:
        """Gives a request that starts, or starts again, a new block table with these blocks."""
        # `stale` is not reset: blocks loaded before a reset have KV of the old weights until the request loses them.
        stale = tracker.stale
        tracker.restart()
        tracker.stale = stale
        self._extend(tracker, blocks)
        started(tracker)

    def _extend(self, tracker: RequestTracker, blocks: Sequence[Sequence[int]]) -> None:
        for table, group in zip(tracker.tables, self._groups, strict=True):
            table.ids.extend(blocks[group.number])


def _lose(tracker: RequestTracker, preempted: OnRequest) -> None:
    """Calls `preempted`, then resets the tracker. The engine has taken the request's blocks."""
    preempted(tracker)
    tracker.restart()
    tracker.preemptions = tracker.request.num_preemptions
