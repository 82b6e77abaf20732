"""The disks behind a segment cache: what host memory has lost, and what an earlier process has left."""

from __future__ import annotations

import math
import select
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from flexkv.blend.base import KvShape
from flexkv.c_ext import KvView
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.tier import TierFactory, TierFacts, WriteMode
from flexkv.cache.tiers.disk.tier import DiskTraffic
from flexkv.cache.tiers.factory import unit_tiers
from flexkv.cache.unit_driver import UnitDriver
from flexkv.config import DiskConfig
from flexkv.layout.format_id import FormatId, Interior
from flexkv.storage.base import DiskGroup, DiskIdentity, DiskOptions, DiskTier
from flexkv.storage.folder_share import bytes_per_folder, own_bytes
from flexkv.storage.unit import DiskUnit
from flexkv.transfer.engine import TransferEngine
from flexkv.transfer.host_pool import HostPool

UNIT = "segments"
"""Name of the ownership unit: one segment cache at a time uses a model's folder."""

LOOK_EVERY_S = 0.05
"""A wait for reads looks at least so often whether a disk was lost."""

FLUSH_LOOK_S = 0.005
"""How often a flush looks whether what it waits for has ended."""


class SegmentDisk:
    """One cache's folders. Driven by the thread that drives the cache; only `wait_while` and `close` wait.

    Args:
        settings: with at least one folder.
        namespace: 32 bytes: whatever keeps two callers apart. Other namespaces lie in folders of their own.
        view: of the staging pool, whose runs a page has.
        model: for people: what `flexkv disk ls` shows.
        ops: reads that one lookup may plan.

    Raises:
        FolderLockedError: another cache, of this process or another, uses the folder.
        FlexKVError: a folder cannot be used; says which and why.
    """

    def __init__(
        self,
        settings: DiskConfig,
        shape: KvShape,
        block_tokens: int,
        namespace: bytes,
        view: KvView,
        model: str,
        ops: int,
    ) -> None:
        runs = view.runs[:, [3, 2, 4]].astype(np.int64)
        format_id = FormatId.of_view(view, Interior.KV_SPLIT_NHD, block_tokens, ranks=1)
        group = DiskGroup(
            str(format_id), (view.stripe_bytes,), (runs,), block_tokens, shape.dtype, host_digests=True
        )
        identity = DiskIdentity(model, namespace, UNIT)
        options = DiskOptions(
            bytes_per_disk=bytes_per_folder(settings, 1, own_bytes(identity, group)),
            io=settings.io,
            depth=settings.depth,
            stuck_s=settings.stuck_s,
            register_buffers=settings.register_buffers,
        )
        folders = [Path(folder) for folder in settings.folders]
        self.tier: DiskTier = DiskUnit.open(folders, identity, [group], options)
        self._settings = settings
        self._ops = ops
        self._manager: LocalCacheManager | None = None
        self._plane: TransferEngine | None = None
        self._driver: UnitDriver | None = None
        self._survives: bool | None = None
        """What `close` found."""

    @property
    def slot_bytes(self) -> int:
        """Of the host pool: a page and all that a disk writes beside it."""
        return self.tier.image_bytes(0)

    @property
    def digest_offset(self) -> int:
        """Where in a slot the digests of its runs lie."""
        return self.tier.digest_offsets(0)[0]

    def tiers(self, pages: int, pool: HostPool) -> Sequence[TierFactory]:
        """The tiers of the cache's manager: host memory, and the folders behind it.

        Pages are promised while they are on their way up, and loaded layer by layer: a prompt computes what a load did
        not bring. Nothing is left to the model, because nobody measures how fast that is.

        Args:
            pages: on their way to host memory at most, and that may wait to be written.
            pool: with slots of `slot_bytes`.
        """
        settings = self._settings
        facts = TierFacts(
            "disk",
            write=WriteMode(settings.mode),
            write_pages=settings.write_pages,
            fetch_pages=pages,
            waiting_pages=max(pages, settings.write_pages),
            fetch_ops=self._ops,
            wait_s=settings.wait_s,
            streams=True,
            stream_layers=True,
        )
        # Reads and writes each have so many, and a result holds its place until it was taken.
        self._plane = TransferEngine(queue_ops=4 * self._ops, lanes=[self.tier.lane([pool])])
        return unit_tiers(self.tier, DiskTraffic(facts, settings.ttl_s), self._plane)

    def start(self, manager: LocalCacheManager, pool: HostPool) -> None:
        """Begins the traffic between `pool` and the folders; `manager` has the tiers that `tiers` gave."""
        self._manager = manager
        self._driver = UnitDriver(manager, fail_read=pool.fail_read)

    @property
    def _down(self) -> bool:
        assert self._manager is not None
        return any(tier.down for tier in self._manager.tiers)

    def pump(self) -> None:
        """Gives the disks what there is to do and takes what was done."""
        if self._driver is not None:
            self._driver.poll()

    def wait_while(self, waits: Callable[[], bool], deadline_s: float) -> None:
        """Returns when nothing waits any more, or after `deadline_s` seconds."""
        assert self._plane is not None
        ends_s = time.monotonic() + deadline_s
        news = select.poll()  # `select.select` refuses descriptors from 1024 on
        news.register(self._plane.event_fd, select.POLLIN)
        self.pump()
        while waits() and (left_s := ends_s - time.monotonic()) > 0:
            news.poll(math.ceil(1000 * min(left_s, LOOK_EVERY_S)))
            self.pump()

    def flush(self, deadline_s: float) -> bool:
        """Writes what only host memory has; whether all of it would survive a crash within `deadline_s` seconds.

        False also where some of it is leased, could not be written, or found no place.
        """
        assert self._manager is not None
        assert self._driver is not None
        ends_s = time.monotonic() + deadline_s
        self._manager.work.offer_all()
        while self._driver.busy or not self._driver.look_durable():
            if time.monotonic() >= ends_s or self._down:
                return False
            self._manager.work.flush()
            self.pump()
            time.sleep(FLUSH_LOOK_S)
        # Not by counts: of what could not be written, some may be gone from host memory or have been written since.
        return not self._down and not self._manager.work.unwritten()

    @property
    def misses(self) -> Mapping[str, int]:
        """Pages that were asked for and not served, by why; see docs/disk-storage.md."""
        return self.tier.stats().misses

    def close(self, deadline_s: float) -> bool:
        """Writes what waits and what only host memory has, and makes it durable. Further calls say the same again.

        False: not all of it within `deadline_s` seconds; the rest is lost, which costs a later miss.
        """
        if self._driver is None or self._manager is None:
            return self.tier.close(deadline_s)
        if self._survives is None:
            ended = self._driver.close(deadline_s)
            durable = self._driver.look_durable() and not self._down
            self._survives = ended and durable and not self._manager.work.unwritten()
        return self._survives
