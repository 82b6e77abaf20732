"""KV events of flexkv's pages, in SGLang's format: pages that came to host memory (`CPU_PINNED`) and to the unit's own
disks (`DISK`), and pages that left them.

SGLang gives a linker only the hashes of pages. Their tokens, and the hashes that events have, come from the key that
SGLang's tree inserts while it offloads, made by SGLang's own recorder of events.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import chain
from typing import Any

import sglang
from msgspec.msgpack import Decoder, Encoder
from msgspec.structs import astuple, replace
from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, StorageMedium
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str

from flexkv.adapters.common.announcements import Announcements, Medium, Named
from flexkv.adapters.common.prompt_keys import GROUP
from flexkv.adapters.sglang.engine_watch import EngineListener
from flexkv.facts.keys import Keys

MEDIA = {Medium.HOST: StorageMedium.CPU, Medium.DISK: StorageMedium.DISK}

CALLERS = 1024
"""The most callers whose records share what they have in common."""

_encode = Encoder().encode
_decode = Decoder().decode


@dataclass(slots=True)
class _Node:
    """A part of a key, with the fields of a tree's node that SGLang's recorder reads."""

    key: RadixKey
    parent: _Node | None
    hash_value: Sequence[str]
    event_hash_value: list[str] | None = None


@dataclass(frozen=True, slots=True)
class StoredPage:
    """What events say about one page. In a file it is a MessagePack array of the fields of SGLang's event.

    Attributes:
        of_caller: an event without hashes, tokens and medium, which the pages of a caller share.
        tokens: EAGLE has pairs of tokens, which follow each other here. An array, because a list would keep an object
            for each token.
    """

    of_caller: BlockStored
    block_hash: int
    parent: int | None
    tokens: array[int]

    def event(self, medium: StorageMedium | None) -> BlockStored:
        tokens: list[Any] = self.tokens.tolist()
        if len(tokens) > self.of_caller.block_size:
            tokens = list(zip(tokens[::2], tokens[1::2], strict=True))
        return replace(
            self.of_caller,
            block_hashes=[self.block_hash],
            parent_block_hash=self.parent,
            token_ids=tokens,
            medium=medium,
        )

    def packed(self) -> bytes:
        """The page as in a file, without the session that stored it."""
        return _encode(astuple(replace(self.event(None), session_id=None)))


class PageEvents(EngineListener):
    """Names the pages of stores as events do, and adds events for them to SGLang's. SGLang's scheduler thread calls it.

    Args:
        params: the parameters of the engine's tree.
    """

    def __init__(self, params: Any, announcements: Announcements) -> None:
        self._announcements = announcements
        self._recorder = KVCacheEventRecorder(
            enabled=True,
            page_size=params.page_size,
            dynamo_format=params.dynamo_kv_event_format,
            lora_names=params.kv_event_lora_names,
        )
        self._stores: deque[list[bytes]] = deque()
        """What the stores under way began, which end in the order in which they began."""
        self._key: RadixKey | None = None
        self._hashes: list[str] | None = None
        """Hashes of all pages of the key, once a store needs them."""

    # --- what the tree inserts ---

    def begin_walk(self, key: RadixKey, of_pairs: bool) -> None:
        # EAGLE has pairs of tokens.
        if of_pairs and not key.is_bigram:
            key = RadixKey(key.token_ids, key.extra_key, True, key.limit, key.cache_salt)
        self._key, self._hashes = key.page_aligned(self._recorder.page_size), None

    def end_walk(self) -> None:
        self._key = self._hashes = None

    # --- stores ---

    def begin_store(self, keys: Keys, hashes: Sequence[str], session_id: str | None) -> None:
        """Called before the pages of a node are stored.

        Args:
            keys: flexkv's keys of the pages.
            hashes: SGLang's names of them.
        """
        named = self._named(hashes, session_id)
        keys = keys[: len(named)]
        self._stores.append(self._announcements.begin_store(GROUP, keys, named))
        self._announcements.note_present(GROUP, keys)

    def end_store(self) -> None:
        """Called when the oldest store has ended."""
        self._announcements.end_store(self._stores.popleft())

    def end_stores(self) -> None:
        while self._stores:
            self.end_store()

    def _named(self, hashes: Sequence[str], session_id: str | None) -> list[Named]:
        """The event data of consecutive pages of the key; none for pages that are not in it or that events cannot
        name."""
        key = self._key
        if key is None or not hashes or not self._is_named(key):
            return []
        if self._hashes is None:
            self._hashes = list(get_storage_hash_str(key, None, page_size=self._recorder.page_size))
        first = self._hashes.index(hashes[0]) if hashes[0] in self._hashes else len(self._hashes)
        if self._hashes[first : first + len(hashes)] != list(hashes):
            return []
        tokens = [(first + at) * self._recorder.page_size for at in (0, len(hashes))]
        parent = _Node(key[:0], None, [])
        if first:
            parent = _Node(key[: tokens[0]], parent, self._hashes[:first])
        self._recorder.record_store(_Node(key[slice(*tokens)], parent, hashes), session_id=session_id)
        # The name of an adapter may stand for different content in the next process.
        return [
            Named(page, page.of_caller.lora_name is None)
            for event in self._recorder.take()
            for page in _pages_of(event)
        ]

    def _is_named(self, key: RadixKey) -> bool:
        """Whether the hashes of events distinguish pages with this extra key from pages without it. In SGLang's own
        format they do so only for the name of an adapter, and a router would expect one caller's pages for another.
        """
        recorder = self._recorder
        return (
            key.extra_key is None
            or recorder.dynamo_format
            or recorder.lora_names.get(key.extra_key) is not None
        )

    # --- what is published ---

    def add_to(self, events: list[Any]) -> list[Any]:
        """The engine's events, which it is about to publish, with those of flexkv's pages."""
        if any(isinstance(event, AllBlocksCleared) for event in events):
            self._announcements.forget_told()
        news = self._announcements.take(_unpacked)
        hashes: dict[Medium, list[int]] = {}
        for medium, page in news.removed:
            assert isinstance(page, StoredPage)
            hashes.setdefault(medium, []).append(page.block_hash)
        removed = [BlockRemoved(block_hashes=gone, medium=MEDIA[medium]) for medium, gone in hashes.items()]
        stored = []
        for medium, page in news.stored:
            assert isinstance(page, StoredPage)
            stored.append(page.event(MEDIA[medium]))
        return [*([AllBlocksCleared()] if news.cleared else []), *events, *removed, *stored]


def words_identity(params: Any) -> bytes:
    """32 bytes that differ between engines that give the same page different names in events.

    Args:
        params: the parameters of the engine's tree.
    """
    parts = ("flexkv sglang pages v2", sglang.__version__, params.page_size, params.dynamo_kv_event_format)
    return sha256("\0".join(map(str, parts)).encode()).digest()


def _pages_of(event: BlockStored) -> list[StoredPage]:
    """The pages of an event."""
    fields = astuple(replace(event, block_hashes=(), parent_block_hash=None, token_ids=(), medium=None))
    of_caller = _of_caller(*fields)
    size, parent, pages = event.block_size, event.parent_block_hash, []
    for number, block_hash in enumerate(event.block_hashes):
        tokens = event.token_ids[number * size : (number + 1) * size]
        if isinstance(tokens[0], Sequence):
            tokens = chain.from_iterable(tokens)
        pages.append(StoredPage(of_caller, block_hash, parent, array("i", tokens)))
        parent = block_hash
    return pages


@lru_cache(CALLERS)
def _of_caller(*fields: Any) -> BlockStored:
    return BlockStored(*fields)


def _unpacked(words: bytes) -> StoredPage:
    [page] = _pages_of(BlockStored(*_decode(words)))
    return page
