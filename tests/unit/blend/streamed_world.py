"""Segments on disk whose layers are read in ranges. A test can make single reads hang, or damage the bytes that they
read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from flexkv.blend.cache import SegmentCache
from flexkv.blend.keys import GROUP
from flexkv.blend.segment_unit import SegmentFolders
from flexkv.config import DiskConfig
from flexkv.storage.header import read_header
from flexkv.storage.striped_slabs import StripedSlabs
from tests import testing_ext
from tests.unit.blend.loaded_world import ROTATION, SHAPE, planes_of
from tests.unit.cache.disk_world import disk_tier

BLOCK_TOKENS = 32
"""Number of tokens per block. With this number, one layer of a page fills a sector of the disk, so that each range of
layers is read separately.
"""
SECTOR = 4096
RANGES = (0, 1, 3)
"""The first layer of each range. The model has 6 layers."""
FIRST, SECOND = np.arange(64), np.arange(500, 596)
"""Tokens of two segments, with two pages and three pages."""
WITHIN_S = 30.0
HANG = 3


def open_cache(folder: Path, wait_s: float = WITHIN_S, streams: bool = True) -> SegmentCache:
    disk = DiskConfig(folders=str(folder), bytes_per_folder=8 << 20, wait_s=wait_s)
    return SegmentCache(
        SHAPE,
        {"model": "m"},
        slots=32,
        staging_tokens=512,
        block_tokens=BLOCK_TOKENS,
        deadline_s=WITHIN_S,
        folders=SegmentFolders(disk, streams=streams, asks_again=True, close_s=5.0),
    )


def store_both(folder: Path) -> dict[tuple[int, int], int]:
    """Stores both segments in the folder and closes the cache. Returns the offset of each page in the slab, by
    (segment number, page number)."""
    cache = open_cache(folder)
    for tokens in (FIRST, SECOND):
        planes = planes_of(tokens)
        cache.store(tokens, lambda layer, of=planes: (of[layer, 0], of[layer, 1]), ROTATION)  # type: ignore[misc]
    assert cache.flush()
    index, at = disk_tier(cache.manager).presence, {}
    header = read_header(str(slab_of(folder)))
    for segment, tokens in enumerate((FIRST, SECOND)):
        entries = index.find(GROUP, cache.scheme.keys(tokens).whole)
        for page, place in enumerate(index.slots_of(entries).tolist()):
            at[segment, page] = header.header_bytes + place * header.slot_bytes
    cache.close()
    return at


def slab_of(folder: Path) -> Path:
    (slab,) = folder.rglob("*.slab")
    return slab


def flip(folder: Path, page: int, layer: int) -> None:
    """Flips a bit of layer `layer` in the page whose offset in the slab is `page`."""
    with slab_of(folder).open("r+b") as file:
        file.seek(page + layer * SECTOR + 77)
        byte = file.read(1)
        file.seek(page + layer * SECTOR + 77)
        file.write(bytes([byte[0] ^ 0x40]))


def with_hanging(
    patch: pytest.MonkeyPatch, page: int, layer: int, make: Callable[[], SegmentCache]
) -> tuple[SegmentCache, testing_ext.IoFaults]:
    """Makes a cache with a disk on which one read hangs: the read of layer `layer` in the page at offset `page` of the
    slab. Returns the cache, and the faults, whose `release` ends the hang.
    """
    rule = testing_ext.IoFaultRule(HANG, write=False, offset=page + layer * SECTOR)
    faults = testing_ext.IoFaults([rule])
    with patch.context() as patched:
        patched.setattr(StripedSlabs, "open", partial(StripedSlabs.open, wrapper=faults))
        return make(), faults


def wait_for(done: Callable[[], bool], within_s: float = WITHIN_S) -> None:
    ends_s = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < ends_s
        time.sleep(0.001)


def end(cache: SegmentCache) -> None:
    """Waits until no op is in flight. Asserts that no staging block is still in use, and closes the cache."""

    def is_quiet() -> bool:
        cache.poll()
        return not cache.manager.work.moving and not cache.manager.inflight_ops()

    wait_for(is_quiet)
    cache.poll()
    cache.manager.check_integrity()
    assert len(cache.staging.free) == cache.staging.rows.shape[1]
    cache.close()
