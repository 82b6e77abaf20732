"""KV events of flexkv's pages, in SGLang's format. They report the pages that came to host memory (`CPU_PINNED`) or to
the unit's own disks (`DISK`), and the pages that left them.

SGLang passes only the hashes of pages to a linker, but events also contain the pages' tokens, and hashes of a different
kind. flexkv takes both from the key that SGLang's tree is inserting when it offloads the pages. SGLang's own event
recorder computes the hashes.
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
"""Largest number of callers for which a shared event is kept. A caller's shared event holds the fields that are equal
in the events of all the caller's pages."""

_encode = Encoder().encode
_decode = Decoder().decode


@dataclass(slots=True)
class _Node:
    """Replaces a node of SGLang's radix tree: holds a part of a key, in the fields that SGLang's event recorder
    reads."""

    key: RadixKey
    parent: _Node | None
    hash_value: Sequence[str]
    event_hash_value: list[str] | None = None


@dataclass(frozen=True, slots=True)
class StoredPage:
    """The description of one page in events. Packed for a file, it is a MessagePack array of the fields of SGLang's
    event.

    Attributes:
        of_caller: an event without hashes, tokens and medium, which all pages of a caller share.
        block_hash: the page's hash in events.
        parent: the hash, in events, of the page before this one; None for the first page of a prompt.
        tokens: the page's tokens, in an array because a list would keep an object for each token. With EAGLE, the key
            consists of pairs of tokens, and the array holds one pair after the other.
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
        """The page's description as bytes for a file, without the id of the session that stored it."""
        return _encode(astuple(replace(self.event(None), session_id=None)))


class PageEvents(EngineListener):
    """Describes the pages that are being stored, and adds the events of flexkv's pages to SGLang's events. SGLang's
    scheduler thread calls all methods.

    Args:
        params: the parameters of the engine's tree.
        announcements: records where pages are.
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
        """For each store operation in flight, the value that `Announcements.begin_store` returned. The operations end
        in the order in which they began."""
        self._key: RadixKey | None = None
        self._hashes: list[str] | None = None
        """SGLang's hashes of all pages of `_key`; None until a store operation needs them."""

    # --- inserts of the tree ---

    def begin_walk(self, key: RadixKey, of_pairs: bool) -> None:
        # With EAGLE, the radix tree converts the key to pairs of tokens.
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
            hashes: SGLang's hashes of the pages.
            session_id: id of the session that stores them; None if it has no id.
        """
        named = self._named(hashes, session_id)
        keys = keys[: len(named)]
        self._stores.append(self._announcements.begin_store(GROUP, keys, named))
        self._announcements.note_present(GROUP, keys)

    def end_store(self) -> None:
        """Called when the oldest store operation has finished."""
        self._announcements.end_store(self._stores.popleft())

    def end_stores(self) -> None:
        while self._stores:
            self.end_store()

    def _named(self, hashes: Sequence[str], session_id: str | None) -> list[Named]:
        """The descriptions of consecutive pages of the key that the radix tree is inserting. Empty if the pages are not
        in the key, or if events cannot distinguish them (see `_is_named`)."""
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
        # The record of a page computed with an adapter is valid only in this process, because in the next process the
        # adapter may have different content under the same name.
        return [
            Named(page, page.of_caller.lora_name is None)
            for event in self._recorder.take()
            for page in _pages_of(event)
        ]

    def _is_named(self, key: RadixKey) -> bool:
        """Whether the hashes in events distinguish the key's pages from pages of the same tokens without an extra key.
        In SGLang's own format, the hashes distinguish these pages only if the extra key is the name of an adapter. For
        any other extra key, a router would take one caller's pages for another caller's.
        """
        recorder = self._recorder
        return (
            key.extra_key is None
            or recorder.dynamo_format
            or recorder.lora_names.get(key.extra_key) is not None
        )

    # --- published events ---

    def add_to(self, events: list[Any]) -> list[Any]:
        """Returns the events that the engine is about to publish, together with the events of flexkv's pages."""
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
    """32 bytes that differ between engines whose events have different hashes for the same page.

    Args:
        params: the parameters of the engine's tree.
    """
    parts = ("flexkv sglang pages v2", sglang.__version__, params.page_size, params.dynamo_kv_event_format)
    return sha256("\0".join(map(str, parts)).encode()).digest()


def _pages_of(event: BlockStored) -> list[StoredPage]:
    """Splits an event into the descriptions of its pages."""
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
