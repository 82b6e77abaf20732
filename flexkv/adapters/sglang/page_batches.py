"""Makes one rank's cache usable from several threads at once; each call is for a batch of pages."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import count

import numpy as np
from numpy.typing import NDArray

from flexkv.adapters.sglang.rank_cache import RankCache
from flexkv.cache.base import Completion
from flexkv.errors import ClosedError
from flexkv.observe import NamedThread, get_logger
from flexkv.transfer.graph import BlockIds

logger = get_logger(__name__)

POLL_S = 0.005
"""Seconds between two polls while the disks have work."""


class PageBatches:
    """Serialises the calls to a cache with a lock. A lookup that waits for the disks does not delay other calls,
    because it releases the lock between two polls.

    Args:
        wait_s: largest number of seconds that a lookup waits for pages on disk.

    Attributes:
        lock: must be held while `cache` is used.
    """

    def __init__(self, cache: RankCache, wait_s: float) -> None:
        self.cache = cache
        self.lock = threading.RLock()
        self._turn = threading.Condition(self.lock)
        self._wait_s = wait_s
        self._stored = threading.Event()
        self._closed = False
        self._numbers = count(1)
        NamedThread("flexkv-hicache", self._write_to_disk).start()

    def exists(self, hashes: Sequence[str]) -> int:
        """Number of leading pages that can be loaded. Pages on disk are read into host memory first.

        Raises:
            ClosedError: `close` was called before.
        """
        with self.lock:
            request, cache = self._request(), self._open
            pages = self._match(request, hashes)
            cache.manager.end_request(request)
            return pages

    def load(self, hashes: Sequence[str], blocks: BlockIds) -> NDArray[np.bool_]:
        """Loads stored pages into engine pages. Pages after the first page that is not stored are not loaded.

        Args:
            hashes: SGLang's hashes of the pages.
            blocks: the engine pages to fill.

        Returns:
            For each page, whether it was loaded, bool [pages].

        Raises:
            ClosedError: `close` was called before, or see `RankCache.finish_load`.
        """
        with self.lock:
            request, cache = self._request(), self._open
            found = self._match(request, hashes)
            graph = cache.manager.begin_load(request, [blocks[:found]]) if found else None
            arrived = np.zeros(len(hashes), np.bool_)
            if graph is not None:
                ended: list[Completion] = []
                cache.finish_load(cache.load(request, graph, ended.append))
                arrived[:found] = ~_failed(blocks[:found], ended)
            cache.manager.end_request(request)
            return arrived

    def store(self, hashes: Sequence[str], blocks: BlockIds) -> NDArray[np.bool_]:
        """Stores engine pages, and waits until they are stored.

        Args:
            hashes: SGLang's hashes of the pages.
            blocks: the engine pages to store.

        Returns:
            For each page, whether it is stored, by this call or before, bool [pages]. If any page got no slot, only
            pages that this call stored are True.

        Raises:
            ClosedError: `close` was called before, or see `RankCache.finish_store`.
        """
        with self.lock:
            request, cache = self._request(), self._open
            ended: list[Completion] = []
            plan = cache.store(request, cache.keys(hashes), blocks, ended.append, None)
            stored = np.ones(len(hashes), np.bool_)
            if plan.dropped:
                # The plan does not distinguish pages that were dropped from pages that were stored before, so neither
                # count as stored.
                stored[:] = False
                stored[plan.stored] = True
            if plan.graph is not None:
                cache.finish_store(plan.graph)
                stored[_failed(blocks, ended)] = False
            cache.manager.end_request(request)
            self._stored.set()
            return stored

    def clear(self) -> None:
        """Forgets everything that was stored."""
        with self.lock:
            self._open.manager.reset()

    def new_weights(self) -> None:
        """Called when the weights are about to change. Nothing stored so far is ever found again."""
        with self.lock:
            if not self._closed:
                self.cache.new_weights()

    def tree_emptied(self) -> None:
        """See `RankCache.tree_emptied`."""
        with self.lock:
            if not self._closed:
                self.cache.tree_emptied()

    def close(self) -> None:
        """Writes the pages that still have to go to disk, and frees the memory. Idempotent."""
        with self.lock:
            if not self._closed:
                self.cache.close()
                self._closed = True
                self._stored.set()
                self._turn.notify_all()

    # --- internals ---

    @property
    def _open(self) -> RankCache:
        if self._closed:
            raise ClosedError("the storage was closed")
        return self.cache

    def _match(self, request: str, hashes: Sequence[str]) -> int:
        try:
            return self.cache.match(request, self.cache.keys(hashes), self._wait_s, self._let_others_in)
        except ClosedError:
            return 0

    def _let_others_in(self, seconds: float) -> None:
        self._turn.wait(seconds)
        if self._closed:
            raise ClosedError("the storage was closed while a lookup waited for its disk")

    def _write_to_disk(self) -> None:
        """Runs in a thread of its own. After each call of `store`, polls the cache until all writes to disk have
        finished, because SGLang may make no further call. `close` ends the loop."""
        while True:
            self._stored.wait()
            self._stored.clear()
            busy = True
            while busy:
                with self.lock:
                    if self._closed:
                        return
                    self.cache.poll()
                    busy = self.cache.disk_busy
                time.sleep(POLL_S)

    def _request(self) -> str:
        return f"batch {next(self._numbers)}"


def _failed(blocks: BlockIds, ended: Sequence[Completion]) -> NDArray[np.bool_]:
    """For each block, whether one of the finished ops reported it as failed, bool [blocks]."""
    return np.isin(blocks, np.concatenate([done.failed_blocks for done in ended]))
