"""KV cache events in the engine's format: blocks that became visible in host memory and on the unit's own disks, and
blocks that left them.

Routers count announcements, so a block is announced once per medium until it is removed there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.kv_cache_utils import ExternalBlockHash, generate_block_hash_extra_keys, to_event_extra_keys

from flexkv.adapters.common.event_book import Entry, EventBook, Found, NamedPages, are_there
from flexkv.adapters.vllm.block_keys import BlockKeys
from flexkv.adapters.vllm.pool_geometry import BlockGeometry, PoolGeometry
from flexkv.adapters.vllm.requests import RequestTracker
from flexkv.adapters.vllm.stored_block import LOCAL, StoredBlock, packed, unpacked
from flexkv.cache.base import CacheListener, StorePlan
from flexkv.cache.keys import EngineKeyChain
from flexkv.cache.stores.base import GROUP, StoreRequest
from flexkv.facts.keys import KEY_BYTES, Keys
from flexkv.observe import get_logger
from flexkv.transfer.graph import OpId, TransferGraph

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = get_logger(__name__)


Prepared = tuple[StoredBlock, BlockStored]
Book = EventBook[Prepared]


class HostPages(Protocol):
    """The part of host memory that announcements need."""

    def present(self, group: int, keys: Keys) -> NDArray[np.bool_]: ...


class OwnDisks(NamedPages, Protocol):
    """The part of the unit's own disks that announcements need."""

    @property
    def in_use(self) -> bool:
        """Whether their pages may be used now."""
        ...


class EventLog(CacheListener):
    """Collects events until the engine takes them. It is made only if the engine publishes events.

    Partial tails have no hash in the engine's format, so there are no events for them.

    Args:
        namespace: the namespace of the engine's keys.
    """

    def __init__(self, geometry: PoolGeometry, namespace: bytes) -> None:
        self._groups = geometry.groups
        self._namespace = namespace
        self._events: list[KVCacheEvent] = []
        self._planned: dict[bytes, StoredBlock] = {}
        self._keys_of_op: dict[OpId, list[bytes]] = {}
        self._in_host: dict[bytes, StoredBlock] = {}
        """Announced data of the blocks in host memory, for when they also get to a disk."""
        self._on_disk: dict[bytes, bytes] = {}
        """The same of the blocks on disk, as packed entries of the book, because there are many; for when they come
        back to host memory."""
        self._make_book: Callable[[], Book] | None = None
        self._book: Book | None = None
        self._host: HostPages | None = None
        self._disk: OwnDisks | None = None
        self._is_over = False
        """The unit serves nothing any more."""

    # --- what an earlier process left ---

    def keep(self, path: Path, identity: Callable[[], bytes], host: HostPages, disk: OwnDisks) -> None:
        """Records the announced disk pages in a file, and announces those of the file's blocks that are still there.

        Args:
            identity: makes `hash_identity`; called by `open_book`.
        """
        self._host, self._disk = host, disk
        self._make_book = lambda: EventBook(path, identity(), self._on_disk, _prepared)

    def open_book(self) -> None:
        """Begins to read the file at the first call. Called with the first step, when the engine has chosen the seed of
        its hashes, and before any page leaves the disks. Failures cost only announcements.
        """
        if self._make_book is None:
            return
        make_book, self._make_book = self._make_book, None
        try:
            self._book = make_book()
        except Exception as error:  # the engine's own code makes the identity
            logger.warning(
                "what is on disk is not announced to routers, by this process and the next: %s: %s",
                type(error).__name__,
                error,
            )

    @property
    def has_more(self) -> bool:
        """Whether further steps would announce more of what an earlier process left. They would not while the disks are
        out of use, or while the weights have no name yet, because the pages may belong to other weights.
        """
        is_reading = self._book is not None and not self._book.is_settled
        return is_reading and not self._is_over and self._disk is not None and self._disk.in_use

    def close(self) -> None:
        """Writes what the next process will announce. Called when no page is written any more. Idempotent."""
        if self._book is not None:
            self._book.close()

    def _announce(self, found: list[Found[Prepared]]) -> None:
        """Announces blocks that the file names, where they are now."""
        assert self._host is not None
        assert self._disk is not None
        for group in range(len(self._groups)):
            of_group = [each for each in found if each.group == group]
            keys = np.frombuffer(b"".join(each.key for each in of_group), np.uint8).reshape(-1, KEY_BYTES)
            if not len(keys):
                continue
            on_disk = are_there(self._disk, group, keys, of_group).tolist()
            in_host = self._host.present(group, keys).tolist()
            for each, is_on_disk, is_in_host in zip(of_group, on_disk, in_host, strict=True):
                key, (block, event) = each.key, each.words
                if is_in_host and key not in self._in_host:
                    self._in_host[key] = block
                    self._events.append(block.event(MEDIUM_CPU))
                if is_on_disk and key not in self._on_disk:
                    self._on_disk[key] = each.entry
                    self._events.append(event)

    # --- stores ---

    def planned(self, request: StoreRequest, group: int, plan: StorePlan, first_block: int) -> None:
        """Prepares the events of a group's store, because the request may be gone when its blocks become visible."""
        if plan.graph is None:
            return
        assert isinstance(request, RequestTracker)
        numbers = [first_block + position for position in plan.stored.tolist()]
        block_keys = request.tables[group].keys
        assert isinstance(block_keys, BlockKeys)
        of_group, of_run = block_keys.keys(), block_keys.first_of_run()
        keys = [of_group[number].tobytes() for number in numbers]
        for number, key in zip(numbers, keys, strict=True):
            block = _block_of(request.request, self._groups[group], number)
            # An adapter's name may stand for other content in the next process.
            block.of_run = block.lora_name is not None or (of_run is not None and number >= of_run)
            self._planned[key] = block
        self._note_ops(plan.graph, keys)

    def planned_by_hash(self, plan: StorePlan, keys: Keys, hashes: Sequence[bytes]) -> None:
        """Prepares the events of lazy stores, for which only the hashes of the blocks are known."""
        if plan.graph is None:
            return
        positions = plan.stored.tolist()
        chain = EngineKeyChain(self._namespace, GROUP)
        chain.extend([hashes[position] for position in positions])
        number, tokens = self._groups[GROUP].number, self._groups[GROUP].block_tokens
        stored = [keys[position].tobytes() for position in positions]
        for position, key, plain in zip(positions, stored, chain.keys, strict=True):
            # Any other key contains the name of an adapter, of a caller's namespace or of this run.
            of_run = key != plain.tobytes()
            self._planned[key] = StoredBlock(number, hashes[position], None, [], tokens, of_run=of_run)
        self._note_ops(plan.graph, stored)

    def _note_ops(self, graph: TransferGraph, stored: list[bytes]) -> None:
        """Records which of these keys each op of a plan stores, one op after the other."""
        first = 0
        for op in graph.ops:
            self._keys_of_op[op.op_id] = stored[first : first + op.pages]
            first += op.pages

    def ended(self, op_id: OpId) -> None:
        """Drops the prepared events of a store that has ended on every rank: no more of its blocks will be
        published.
        """
        for key in self._keys_of_op.pop(op_id, ()):
            self._planned.pop(key, None)

    # --- what the manager notifies of ---

    def on_publish(self, group: int, keys: Keys) -> None:
        for row in keys:
            key = row.tobytes()
            block = self._planned.pop(key, None)
            if key in self._in_host:
                continue
            if block is None and (entry := self._on_disk.get(key)) is not None:
                block = unpacked(Entry.unpacked(entry).words)
            if block is not None:
                self._in_host[key] = block
                self._events.append(block.event(MEDIUM_CPU))

    def on_evict(self, group: int, keys: Keys) -> None:
        gone = [block for row in keys if (block := self._in_host.pop(row.tobytes(), None)) is not None]
        self._removed(group, [block.name for block in gone], MEDIUM_CPU)

    def on_write(self, group: int, keys: Keys, generations: NDArray[np.uint64]) -> None:
        kept = []
        for row, generation in zip(keys, generations.tolist(), strict=True):
            key = row.tobytes()
            # A store that goes to disk without host memory has only a planned event.
            block = self._in_host.get(key) or self._planned.get(key)
            if block is None or key in self._on_disk:
                continue
            self._events.append(block.event(MEDIUM_STORAGE))
            entry = self._on_disk[key] = Entry(key, group, generation, packed(block)).packed()
            if not block.of_run:
                kept.append(entry)
        if kept and self._book is not None:
            self._book.put(kept)

    def on_unwrite(self, group: int, keys: Keys) -> None:
        entries = [entry for row in keys if (entry := self._on_disk.pop(row.tobytes(), None)) is not None]
        gone = [(each.key, unpacked(each.words)) for each in map(Entry.unpacked, entries)]
        if self._book is not None and self._book.is_settled:
            self._book.drop([key for key, block in gone if not block.of_run])
        elif self._book is not None:
            # The file may name blocks that are not announced yet.
            self._book.drop([row.tobytes() for row in keys])
        self._removed(group, [block.name for _, block in gone], MEDIUM_STORAGE)

    def _removed(self, group: int, hashes: list[ExternalBlockHash], medium: str) -> None:
        if hashes:
            number = self._groups[group].number
            self._events.append(
                BlockRemoved(block_hashes=hashes, medium=medium, group_idx=number, locality=LOCAL)
            )

    def on_reset(self, epoch: int) -> None:
        self._in_host.clear()
        self._on_disk.clear()
        self._events.append(AllBlocksCleared())

    def end(self) -> None:
        """Called when the unit no longer serves anything. Pages on disk stay in the book for the next process."""
        if not self._is_over:
            self._is_over = True
            self._events = [AllBlocksCleared()]

    def take(self) -> Iterable[KVCacheEvent]:
        """Takes the events since the last call."""
        if self.has_more:
            assert self._book is not None
            self._announce(self._book.take())
        events, self._events = self._events, []
        if self._is_over:
            return [event for event in events if isinstance(event, AllBlocksCleared)]
        return events


def _prepared(words: bytes) -> Prepared:
    """Unpacks a block for the book's thread: returns the block, and the event that announces it on disk."""
    block = unpacked(words)
    return block, block.event(MEDIUM_STORAGE)


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
        list(request.all_token_ids[first:end]),
        tokens,
        lora.adapter_id if lora else None,
        lora.name if lora else None,
        named[0] if named else None,
        request.session_id,
    )
