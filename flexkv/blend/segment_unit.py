"""The unit of a segment cache: host memory, and optionally disk folders that keep pages evicted from host memory."""

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
"""Name of the ownership unit. It is the same for all segment caches, so only one cache at a time can use a model's
folder.
"""

QUEUE_PLACES = 4
"""The queue of the disks' lane has this many entries per read that one lookup may plan. Read ops and write ops each
need some entries, and a finished op keeps its entry until its result is taken.
"""

LOOK_EVERY_S = 0.05
"""During a wait for reads, the longest time in seconds between two checks of whether a disk was lost."""

FLUSH_LOOK_S = 0.005
"""During a flush, seconds between two checks of whether all writes have finished."""


@dataclass(frozen=True, slots=True)
class SegmentFolders:
    """Settings for the disk folders in which a segment cache keeps pages, in addition to host memory.

    Attributes:
        disk: the settings of the disk tier; if they name no folders, pages are only in host memory.
        model: name of the model that `flexkv disk ls` shows.
        unit: name of the ownership unit. Caches with one namespace that run at the same time need different names.
        weights: the weights that the namespace identifies only by samples. Until all their content has been read, the
            folders neither serve nor accept pages.
        streams: whether pages are promised while they are being read from disk, and loaded layer by layer. If False, a
            page is promised when it is in host memory.
        asks_again: whether all lookups are made through `SegmentFetch`, which repeats the lookup of a segment whose
            pages must wait for slots in host memory.
        close_s: how long `close` may take, in seconds; None for the same time as any other wait.
        peers: settings for sharing pages with running caches that have the same namespace.
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
    """The unit of one segment cache. Only the cache's thread may call it. Only the constructor, `wait_while`, `flush`
    and `close` may wait.

    The engine computes the pages that a load does not deliver. The unit loads cached pages even if computing them would
    be faster, because it does not measure the model's speed.

    Args:
        shape: shape of the model's KV.
        block_tokens: tokens per block.
        slots: number of slots of the host pool.
        view: the view of the staging pool, which determines the runs of a page.
        pages: number of pages of the staging pool, and the largest number of pages that may be in flight.
        namespace: digest of everything that separates two callers, 32 bytes. Each namespace has its own folders.
        folders: settings for the disk folders that keep pages in addition to host memory.
        ops: how many reads one lookup may plan.
        deadline_s: how long each wait may last, in seconds.

    Attributes:
        live: the unit as `build_unit` returns it.
        close_s: how long `close` may take by default, in seconds.
        streams: whether pages are promised while they are being read from disk.
        wait_s: the setting `disk.wait_s`: how long a lookup waits for reads at most, in seconds.

    Raises:
        CapacityError: the pool does not fit into the available memory.
        FolderLockedError: another cache, in this process or another, uses a folder.
        FlexKVError: a folder cannot be used. The message says which one and why.
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
        """The result of the first call of `close`; None before that call."""

    @property
    def _down(self) -> bool:
        return any(tier.down for tier in self.live.manager.tiers)

    def wait_while(self, waits: Callable[[], bool], deadline_s: float) -> None:
        """Polls the tiers until `waits` returns False, for `deadline_s` seconds at most."""
        ends_s = time.monotonic() + deadline_s
        news = select.poll()  # `select.select` refuses file descriptors above 1023
        for tier in self.live.manager.tiers:
            if isinstance(tier.plane, TransferEngine):
                news.register(tier.plane.event_fd, select.POLLIN)
        self.live.poll()
        while waits() and (left_s := ends_s - time.monotonic()) > 0:
            news.poll(math.ceil(1000 * min(left_s, LOOK_EVERY_S)))
            self.live.poll()

    def flush(self, deadline_s: float) -> bool:
        """Writes the pages that only host memory has, within `deadline_s` seconds. Returns whether all of them would
        survive a crash.

        Returns False if there is no disk, or if some pages are pinned, could not be written, or got no disk slot.
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
        # Failed writes are not counted here, because a page whose write failed may have left host memory since, or may
        # have been written by a later attempt.
        return not self._down and not work.unwritten()

    def take_moved(self) -> dict[str, int]:
        """Returns the number of pages that were read from disk ("read") and written to it ("write") since the last
        call; directions without pages are left out.
        """
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
        """Number of requested pages that the disks did not deliver, by reason (see docs/disk-storage.md). Empty if
        there are no disks."""
        return {
            reason: count
            for tier in self.live.manager.tiers
            if isinstance(tier, DiskTier)
            for reason, count in tier.volumes.stats().misses.items()
        }

    def close(self, close_s: float) -> bool:
        """Writes the pages that only host memory has, makes them durable, and closes the unit, within `close_s`
        seconds. Later calls return the result of the first call.

        Returns:
            Whether all pages survive. False if there is no disk, a disk was lost, some pages could not be written, or
            the time was too short. Later lookups do not find pages that did not survive.
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
