"""KV cache events in the engine's format: blocks that became visible in host memory and on the unit's own disks, and
blocks that left them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    KVCacheEvent,
)
from vllm.v1.core.kv_cache_utils import ExternalBlockHash, generate_block_hash_extra_keys, to_event_extra_keys

from flexkv.adapters.common.announcements import Announcements, Medium, Named, News, OwnDisks, Tier
from flexkv.adapters.vllm.block_keys import BlockKeys
from flexkv.adapters.vllm.pool_geometry import BlockGeometry, PoolGeometry
from flexkv.adapters.vllm.requests import RequestTracker
from flexkv.adapters.vllm.stored_block import LOCAL, StoredBlock, token_array, unpacked
from flexkv.cache.base import StorePlan
from flexkv.cache.keys import EngineKeyChain
from flexkv.cache.stores.base import GROUP, StoreRequest
from flexkv.facts.keys import Keys
from flexkv.observe import get_logger
from flexkv.transfer.graph import OpId, TransferGraph

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = get_logger(__name__)

MEDIA = {Medium.HOST: MEDIUM_CPU, Medium.DISK: MEDIUM_STORAGE}


class EventLog(Announcements):
    """Announces blocks in the engine's events. It is made only if the engine publishes events.

    Partial tails have no hash in the engine's format, so there are no events for them.

    Args:
        namespace: the namespace of the engine's keys.
        book: the file beside the unit's own disks that informs the next process; None for none.
        identity: makes `hash_identity`; called by `begin_book`.
    """

    def __init__(
        self,
        geometry: PoolGeometry,
        namespace: bytes,
        host: Tier,
        disk: OwnDisks | None = None,
        book: Path | None = None,
        identity: Callable[[], bytes] = bytes,
    ) -> None:
        super().__init__(host, disk)
        self._groups = geometry.groups
        self._namespace = namespace
        self._path = book
        self._identity = identity
        self._rows_of_op: dict[OpId, list[bytes]] = {}
        self._is_over = False
        """The unit serves nothing any more."""

    def begin_book(self) -> None:
        """Opens the book at the first call. Called with the first step, when the engine has chosen the seed of its
        hashes. Failures cost only announcements."""
        if self._path is None:
            return
        path, self._path = self._path, None
        try:
            self.open_book(path, self._identity())
        except Exception as error:  # the engine's own code makes the identity
            logger.warning(
                "what is on disk is not announced to routers, by this process and the next: %s: %s",
                type(error).__name__,
                error,
            )

    @property
    def has_more(self) -> bool:
        return not self._is_over and super().has_more

    # --- stores ---

    def planned(self, request: StoreRequest, group: int, plan: StorePlan, first_block: int) -> None:
        """Prepares the events of a group's store, because the request may be gone when its blocks become visible."""
        if plan.graph is None:
            return
        assert isinstance(request, RequestTracker)
        numbers = first_block + plan.stored
        block_keys = request.tables[group].keys
        assert isinstance(block_keys, BlockKeys)
        of_run, named = block_keys.first_of_run(), []
        for number in numbers.tolist():
            block = _block_of(request.request, self._groups[group], number)
            # An adapter's name may stand for different content in the next process.
            named.append(Named(block, block.lora_name is None and (of_run is None or number < of_run)))
        self._begin_ops(plan.graph, group, block_keys.keys()[numbers], named)

    def planned_by_hash(self, plan: StorePlan, keys: Keys, hashes: Sequence[bytes]) -> None:
        """Prepares the events of lazy stores, for which only the hashes of the blocks are known."""
        if plan.graph is None:
            return
        stored, names = keys[plan.stored], [hashes[position] for position in plan.stored.tolist()]
        chain = EngineKeyChain(self._namespace, GROUP)
        chain.extend(names)
        # Any other key contains the name of an adapter, of a caller's namespace or of this run.
        lasting = (stored == chain.keys).all(axis=1).tolist()
        number, tokens, none = self._groups[GROUP].number, self._groups[GROUP].block_tokens, token_array(())
        named = [
            Named(StoredBlock(number, name, None, none, tokens), lasts)
            for name, lasts in zip(names, lasting, strict=True)
        ]
        self._begin_ops(plan.graph, GROUP, stored, named)

    def _begin_ops(self, graph: TransferGraph, group: int, keys: Keys, named: Sequence[Named]) -> None:
        """Begins the store of each op of a plan, whose pages follow each other in `keys`."""
        first = 0
        for op in graph.ops:
            end = first + op.pages
            self._rows_of_op[op.op_id] = self.begin_store(group, keys[first:end], named[first:end])
            first = end

    def ended(self, op_id: OpId) -> None:
        """Called when a store has ended on every rank."""
        self.end_store(self._rows_of_op.pop(op_id, ()))

    # --- what is published ---

    def end(self) -> None:
        """Called when the unit no longer serves anything. Pages on disk stay in the book for the next process."""
        if not self._is_over:
            self._is_over, self._news = True, News(cleared=True)

    def take_events(self) -> list[KVCacheEvent]:
        """Takes the events since the last call, as many as `take` allows."""
        news = self.take(unpacked)
        events: list[KVCacheEvent] = [AllBlocksCleared()] if news.cleared else []
        if self._is_over:
            return events
        removed: dict[tuple[Medium, int], list[ExternalBlockHash]] = {}
        for medium, block in news.removed:
            assert isinstance(block, StoredBlock)
            removed.setdefault((medium, block.number), []).append(block.name)
        events += (
            BlockRemoved(block_hashes=hashes, medium=MEDIA[medium], group_idx=number, locality=LOCAL)
            for (medium, number), hashes in removed.items()
        )
        for medium, block in news.stored:
            assert isinstance(block, StoredBlock)
            events.append(block.event(MEDIA[medium]))
        return events


def _block_of(request: Request, geometry: BlockGeometry, block: int) -> StoredBlock:
    tokens, ratio = geometry.block_tokens, geometry.hashes_per_block
    first, end = block * tokens, (block + 1) * tokens
    hashes = request.block_hashes
    mm_index = next(
        (
            index
            for index, feature in enumerate(request.mm_features)
            if feature.mm_position.offset + feature.mm_position.length > first
        ),
        len(request.mm_features),
    )
    extra, _ = generate_block_hash_extra_keys(request, first, end, mm_index)
    named = to_event_extra_keys([extra] if extra else None)
    lora = request.lora_request
    return StoredBlock(
        geometry.number,
        bytes(hashes[(block + 1) * ratio - 1]),
        bytes(hashes[block * ratio - 1]) if block else None,
        token_array(request.all_token_ids[first:end]),
        tokens,
        lora.adapter_id if lora else None,
        lora.name if lora else None,
        named[0] if named else None,
        request.session_id,
    )
