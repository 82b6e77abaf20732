"""KV cache events in the engine's format: blocks that became visible in host memory, and blocks that left it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    ExternalBlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

from flexkv.adapters.vllm.pool_geometry import BlockGeometry, PoolGeometry
from flexkv.adapters.vllm.requests import RequestTracker
from flexkv.cache.base import CacheListener, StorePlan
from flexkv.cache.stores.base import StoreRequest
from flexkv.facts.keys import Keys
from flexkv.transfer.graph import OpId, TransferGraph

if TYPE_CHECKING:
    from vllm.v1.request import Request

LOCAL = "LOCAL"


class EventLog(CacheListener):
    """Collects events until the engine takes them. It is made only where the engine publishes events.

    Partial tails have no hash in the engine's format, so there are no events for them.
    """

    def __init__(self, geometry: PoolGeometry) -> None:
        self._groups = geometry.groups
        self._events: list[KVCacheEvent] = []
        self._planned: dict[bytes, BlockStored] = {}
        self._keys_of_op: dict[OpId, list[bytes]] = {}
        self._announced: dict[bytes, list[ExternalBlockHash]] = {}

    def planned(self, request: StoreRequest, group: int, plan: StorePlan, first_block: int) -> None:
        """Prepares the events of a group's store, because the request may be gone when its blocks become visible."""
        if plan.graph is None:
            return
        assert isinstance(request, RequestTracker)
        numbers = [first_block + position for position in plan.stored.tolist()]
        of_group = request.tables[group].keys.keys()
        keys = [of_group[number].tobytes() for number in numbers]
        for number, key in zip(numbers, keys, strict=True):
            self._planned[key] = self._stored(request.request, self._groups[group], number)
        self._note_ops(plan.graph, keys)

    def planned_by_hash(self, plan: StorePlan, keys: Keys, hashes: Sequence[bytes]) -> None:
        """Prepares the events of lazy stores, for which only the hashes of the blocks are known."""
        if plan.graph is None:
            return
        positions = plan.stored.tolist()
        for position in positions:
            self._planned[keys[position].tobytes()] = BlockStored(
                block_hashes=[maybe_convert_block_hash(BlockHash(hashes[position]))],
                parent_block_hash=None,
                token_ids=[],
                block_size=self._groups[0].block_tokens,
                lora_id=None,
                medium=MEDIUM_CPU,
                lora_name=None,
                group_idx=0,
                locality=LOCAL,
            )
        self._note_ops(plan.graph, [keys[position].tobytes() for position in positions])

    def _note_ops(self, graph: TransferGraph, stored: list[bytes]) -> None:
        """Notes which of these keys each op of a plan stores, one op after the other."""
        first = 0
        for op in graph.ops:
            self._keys_of_op[op.op_id] = stored[first : first + op.pages]
            first += op.pages

    def ended(self, op_id: OpId) -> None:
        """Drops the prepared events of a store that has ended on every rank: nothing more of it will be published."""
        for key in self._keys_of_op.pop(op_id, ()):
            self._planned.pop(key, None)

    def on_publish(self, group: int, keys: Keys) -> None:
        for row in keys:
            key = row.tobytes()
            event = self._planned.pop(key, None)
            if event is not None:
                self._announced[key] = event.block_hashes
                self._events.append(event)

    def on_evict(self, group: int, keys: Keys) -> None:
        gone = [block_hash for row in keys for block_hash in self._announced.pop(row.tobytes(), ())]
        if gone:
            self._events.append(
                BlockRemoved(
                    block_hashes=gone,
                    medium=MEDIUM_CPU,
                    group_idx=self._groups[group].number,
                    locality=LOCAL,
                )
            )

    def on_reset(self, epoch: int) -> None:
        self._announced.clear()
        self._events.append(AllBlocksCleared())

    def take(self) -> Iterable[KVCacheEvent]:
        """Takes the events since the last call."""
        events, self._events = self._events, []
        return events

    def _stored(self, request: Request, group: BlockGeometry, block: int) -> BlockStored:
        tokens, ratio = group.block_tokens, group.hashes_per_block
        first, end = block * tokens, (block + 1) * tokens
        hashes = request.block_hashes
        parent = hashes[block * ratio - 1] if block else None
        mm_index = next(
            (
                index
                for index, feature in enumerate(request.mm_features)
                if feature.mm_position.offset + feature.mm_position.length > first
            ),
            len(request.mm_features),
        )
        extra, _ = generate_block_hash_extra_keys(request, first, end, mm_index)
        lora = request.lora_request
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(hashes[(block + 1) * ratio - 1])],
            parent_block_hash=maybe_convert_block_hash(parent) if parent is not None else None,
            token_ids=list(request.all_token_ids[first:end]),
            block_size=tokens,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM_CPU,
            lora_name=lora.name if lora else None,
            extra_keys=to_event_extra_keys([extra] if extra else None),
            group_idx=group.number,
            locality=LOCAL,
            session_id=request.session_id,
        )
