"""The unit of a segment cache: host memory, and optionally folders that keep pages evicted from host memory."""

from __future__ import annotations

import math
import select
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flexkv.blend.base import KvShape
from flexkv.c_ext import KvView
from flexkv.cache.tiers.disk.tier import DiskTier
from flexkv.config import (
    DiskConfig,
    FlexKVConfig,
    HostConfig,
    LoadConfig,
    PeersConfig,
    StoreConfig,
    TransferConfig,
)
from flexkv.errors import CapacityError
from flexkv.facts.ranks import GroupFacts, KvGroup, RankFacts, UnitOwner
from flexkv.layout.format_id import FormatId, Interior
from flexkv.transfer.engine import TransferEngine
from flexkv.unit.base import CacheRole
from flexkv.unit.build import build_unit
from flexkv.weights.files import NAMED, WeightsContent

UNIT = "segments"
"""Name of the ownership unit: one segment cache at a time uses a model's folder."""

QUEUE_PLACES = 4
"""Queue entries of the disks' lane per op of a lookup: reads and writes each have this many, and a result holds its
entry until it was taken."""

LOOK_EVERY_S = 0.05
"""How often a wait for reads checks, at least, whether a disk was lost."""

FLUSH_LOOK_S = 0.005
"""How often a flush checks whether everything has ended."""


@dataclass(frozen=True, slots=True)
class SegmentFolders:
    """Where and how a cache keeps its pages beyond host memory.

    Attributes:
        disk: the folders; without any, pages are only in host memory.
        model: name that `flexkv disk ls` shows to people.
        unit: name of the ownership unit; caches of one namespace that run at the same time need different names.
        weights: the weights that the namespace names only by samples: until all of them have a name, the folders
            neither serve nor take pages.
        streams: promise pages while they are being read, and load them layer by layer. Otherwise a page is promised
            once it is in host memory.
        asks_again: lookups are fetches (`SegmentFetch`), which ask again for pages that must wait.
        close_s: how long a close may take; None for as long as any other wait.
        peers: which pages running caches with the same namespace show each other.
    """

    disk: DiskConfig = field(default_factory=DiskConfig)
    model: str = "segments"
    unit: str = UNIT
    weights: WeightsContent = NAMED
    streams: bool = True
    asks_again: bool = False
    close_s: float | None = None
    peers: PeersConfig = field(default_factory=PeersConfig)


class SegmentUnit:
    """The unit of one segment cache, driven by the cache's thread; only `wait_while`, `flush` and `close` wait.

    Pages that a load did not bring are computed with the prompt. No page is left to the model merely because computing
    may be sooner than loading: the model's speed is not measured.

    Args:
        slots: slots of the host pool.
        view: view of the staging pool; it says which runs make up a page.
        pages: pages of the staging pool, which is also the largest number of pages being stored at once.
        namespace: 32 bytes: everything that separates two callers. Each namespace has its own folders.
        ops: reads that one lookup may plan.
        deadline_s: seconds that each wait lasts at most.

    Attributes:
        close_s: how long a close may take.
        streams: whether pages are promised while they are being read.
        wait_s: if not `streams`, how long a lookup waits for pages that are being read.

    Raises:
        CapacityError: the available memory does not hold the pool.
        FolderLockedError: another cache, of this process or another, uses a folder.
        FlexKVError: a folder cannot be used; the message says which and why.
    """

    def __init__(
        self,
        shape: KvShape,
        block_tokens: int,
        slots: int,
        view: KvView,
        pages: int,
        namespace: bytes,
        folders: SegmentFolders,
        ops: int,
        deadline_s: float,
    ) -> None:
        format_id = str(FormatId.of_view(view, Interior.KV_SPLIT_NHD, block_tokens, ranks=1))
        self.close_s = deadline_s if folders.close_s is None else folders.close_s
        facts = RankFacts.here(0, pages, GroupFacts.of_view(view, format_id, dtype=shape.dtype))
        config = FlexKVConfig(
            host=HostConfig(bytes=slots * view.stripe_bytes, verify=True),
            load=LoadConfig(mode="layerwise", inflight_pages=pages),
            store=StoreConfig(inflight_pages=max(pages, folders.disk.write_pages)),
            transfer=TransferConfig(
                queue_ops=QUEUE_PLACES * ops,
                close_s=self.close_s,
            ),
            disk=folders.disk.model_copy(
                update={"stream": folders.streams, "gds": "off", "gds_stores": False}
            ),
            peers=folders.peers,
        )
        role = CacheRole(recomputes=True, compute_if_faster=False, asks_again=folders.asks_again)
        owner = UnitOwner(folders.model, namespace, folders.unit, folders.weights)
        self.live = build_unit(config, [KvGroup(block_tokens)], {0: facts}, owner, role, slots=slots)
        self.streams, self.wait_s = folders.streams and self.live.has_tiers, folders.disk.wait_s
        if not self.live.pool.wait_ready(slots, deadline_s):
            reason = self.live.pool.stopped_reason
            self.live.close()
            raise CapacityError(f"the pool for {slots} pages was not mapped: {reason}")
        self.live.grow()
        self._moved = {"read": 0, "write": 0}
        self._survives: bool | None = None
        """The result of `close`."""

    @property
    def _down(self) -> bool:
        return any(tier.down for tier in self.live.manager.tiers)

    def wait_while(self, waits: Callable[[], bool], deadline_s: float) -> None:
        """Waits until the condition ends, or for `deadline_s` seconds."""
        ends_s = time.monotonic() + deadline_s
        news = select.poll()  # `select.select` refuses descriptors from 1024 on
        for tier in self.live.manager.tiers:
            if isinstance(tier.plane, TransferEngine):
                news.register(tier.plane.event_fd, select.POLLIN)
        self.live.poll()
        while waits() and (left_s := ends_s - time.monotonic()) > 0:
            news.poll(math.ceil(1000 * min(left_s, LOOK_EVERY_S)))
            self.live.poll()

    def flush(self, deadline_s: float) -> bool:
        """Writes what only host memory has; returns whether all of it would survive a crash by `deadline_s` seconds.

        False if there is no disk, or if some pages are pinned, could not be written, or had no room.
        """
        if not self.live.has_tiers:
            return False
        ends_s = time.monotonic() + deadline_s
        work = self.live.manager.work
        work.offer_all()
        while self.live.busy or not self.live.driver.look_durable():
            if time.monotonic() >= ends_s or self._down:
                return False
            work.flush()
            self.live.poll()
            time.sleep(FLUSH_LOOK_S)
        # Does not compare counts: pages that could not be written may have left host memory, or have been
        # written since.
        return not self._down and not work.unwritten()

    def take_moved(self) -> dict[str, int]:
        """Pages read from disk and written to it since the last call, by direction."""
        counts = [tier.counts for tier in self.live.manager.tiers[1:]]
        total = {
            "read": sum(each.read for each in counts),
            "write": sum(each.written for each in counts),
        }
        moved = {
            name: pages - self._moved[name] for name, pages in total.items() if pages > self._moved[name]
        }
        self._moved = total
        return moved

    @property
    def misses(self) -> Mapping[str, int]:
        """How many requested pages were not served, by reason; see docs/disk-storage.md. Empty without disks."""
        return {
            reason: count
            for tier in self.live.manager.tiers
            if isinstance(tier, DiskTier)
            for reason, count in tier.volumes.stats().misses.items()
        }

    def close(self, close_s: float) -> bool:
        """Writes pending pages and those only in host memory, and makes them durable, within `close_s` seconds. Later
        calls return the result of the first.

        Returns False if the deadline passed first, or there is no disk. Pages that are lost become misses.
        """
        if self._survives is None:
            ended = self.live.close(close_s)
            self._survives = (
                self.live.has_tiers
                and ended
                and self.live.driver.look_durable()
                and not self._down
                and not self.live.manager.work.unwritten()
            )
        return self._survives
