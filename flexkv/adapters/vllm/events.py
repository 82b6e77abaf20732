"""Makes KV cache events in the engine's format. They announce blocks that became visible in host memory or on the
unit's own disks, and blocks that were removed from there."""

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
    """Announces blocks in the engine's KV cache events. Exists only if the engine publishes events.

    There are no events for partial tails, because the engine has no hash for them.

    Args:
        disk: the tier of the unit's own disks; None if the unit has none.
        book: the file that describes the pages on disk, so that the engine's next process can announce them; None for
            no file.
        identity: returns the `hash_identity` of the engine; called by `begin_book`.
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
        """Whether the unit no longer serves lookups, so that nothing is announced any more."""

    def begin_book(self) -> None:
        """Opens the event book in the first call; later calls do nothing. If opening fails, pages on disk are not
        announced.

        Call order:
            In the engine's first step, because the engine has chosen the seed of its hashes by then.
        """
        if self._path is None:
            return
        path, self._path = self._path, None
        try:
            self.open_book(path, self._identity())
        except Exception as error:  # the engine's own code computes the identity, and may raise anything
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
        """Prepares the events of a group's store operation when the operation is planned, because the request may have
        ended when its blocks become visible."""
        if plan.graph is None:
            return
        assert isinstance(request, RequestTracker)
        numbers = first_block + plan.stored
        block_keys = request.tables[group].keys
        assert isinstance(block_keys, BlockKeys)
        of_run, named = block_keys.first_of_run(), []
        for number in numbers.tolist():
            block = _block_of(request.request, self._groups[group], number)
            # The next process does not announce a block that was computed with an adapter, because by then the adapter
            # may have different content.
            named.append(Named(block, block.lora_name is None and (of_run is None or number < of_run)))
        self._begin_ops(plan.graph, group, block_keys.keys()[numbers], named)

    def planned_by_hash(self, plan: StorePlan, keys: Keys, hashes: Sequence[bytes]) -> None:
        """Prepares the events of a lazy store operation. Only the hashes of its blocks are known."""
        if plan.graph is None:
            return
        stored, names = keys[plan.stored], [hashes[position] for position in plan.stored.tolist()]
        chain = EngineKeyChain(self._namespace, GROUP)
        chain.extend(names)
        # The next process can announce only plain keys. Other keys depend on an adapter, a named namespace or this run.
        lasting = (stored == chain.keys).all(axis=1).tolist()
        number, tokens, none = self._groups[GROUP].number, self._groups[GROUP].block_tokens, token_array(())
        named = [
            Named(StoredBlock(number, name, None, none, tokens), lasts)
            for name, lasts in zip(names, lasting, strict=True)
        ]
        self._begin_ops(plan.graph, GROUP, stored, named)

    def _begin_ops(self, graph: TransferGraph, group: int, keys: Keys, named: Sequence[Named]) -> None:
        """Registers the pages that each op of a plan stores. `keys` and `named` list the pages of all ops, in the order
        of the ops."""
        first = 0
        for op in graph.ops:
            end = first + op.pages
            self._rows_of_op[op.op_id] = self.begin_store(group, keys[first:end], named[first:end])
            first = end

    def ended(self, op_id: OpId) -> None:
        """Records that a store op has ended on every rank, so that no more of its blocks will become visible."""
        self.end_store(self._rows_of_op.pop(op_id, ()))

    # --- what is published ---

    def end(self) -> None:
        """Announces that all blocks are gone, because the unit no longer serves lookups. Pages on disk stay in the book
        for the next process."""
        if not self._is_over:
            self._is_over, self._news = True, News(cleared=True)

    def take_events(self) -> list[KVCacheEvent]:
        """Returns the events that are due since the last call, at most as many as `take` returns at once."""
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
