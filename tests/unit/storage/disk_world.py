"""A disk tier with a host pool and a transfer engine, but without an inference engine's pool: the test writes pages
directly into host slots.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flexkv import c_ext
from flexkv.storage.base import DiskEvents, DiskGroup, DiskIdentity, DiskOptions, IndexRows
from flexkv.storage.folder import unit_folder
from flexkv.storage.group_tables import codec_of
from flexkv.storage.sharing import slab_numbers
from flexkv.storage.striped_slabs import StripedSlabs
from flexkv.storage.tags import make_tags
from flexkv.transfer.engine import TransferEngine
from flexkv.transfer.graph import (
    NO_DIGESTS,
    OpId,
    OpKind,
    OpResult,
    Priority,
    RunDigests,
    TransferGraph,
    TransferOp,
)
from flexkv.transfer.host_pool import HostPool
from tests import testing_ext

GENEROUS_S = 60.0
NO_HOLES = "this file system does not tell which parts of a file were never written"
FAIL, SHORT, CORRUPT, STALL = range(4)
IDENTITY = DiskIdentity("a/model", bytes(range(32)))
BLOCK_TOKENS = 16


def make_group(
    layers: int = 4, run_bytes: int = 4096, kv: int = 2, ranks: int = 1, host_digests: bool = False
) -> DiskGroup:
    """A KV group of `layers` layers with `kv` runs each. The runs are in the order of the layers, and every rank has
    the same runs.
    """
    count = layers * kv
    runs = np.array([(i * run_bytes, run_bytes, i // kv) for i in range(count)], np.int64)
    return DiskGroup(
        "test", (count * run_bytes,) * ranks, (runs,) * ranks, BLOCK_TOKENS, "uint8", host_digests
    )


def sharing_groups() -> list[DiskGroup]:
    """Returns a full group, and two groups that share its slabs: a window group with slot images of the same size, and
    a state group with smaller slot images.
    """
    full = make_group(layers=3, run_bytes=4608, kv=1)
    state = make_group(layers=2, run_bytes=2560, kv=2)
    return [
        replace(full, signature=b"full"),
        replace(full, format_id="test window", rule="window", reach=2, signature=b"window", shares=0),
        replace(state, format_id="test state", rule="state", signature=b"state", shares=0),
    ]


def ids(values: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int32]:
    return np.ascontiguousarray(values, np.int32)


def key_of(number: int) -> NDArray[np.uint8]:
    return np.frombuffer(number.to_bytes(16, "big"), np.uint8)


def keys_of(numbers: Sequence[int]) -> NDArray[np.uint8]:
    return np.stack([key_of(number) for number in numbers])


def holes(slab: Path) -> int:
    """Returns the number of bytes of the slab for which the file system has allocated no space."""
    fd = os.open(slab, os.O_RDONLY)
    try:
        size, at, found = os.fstat(fd).st_size, 0, 0
        while at < size and (begin := os.lseek(fd, at, os.SEEK_HOLE)) < size:
            try:
                at = os.lseek(fd, begin, os.SEEK_DATA)
            except OSError:
                at = size
            found += at - begin
        return found
    finally:
        os.close(fd)


def run_op(engine: TransferEngine, op: TransferOp) -> OpResult:
    ticket = engine.submit(TransferGraph((op,)))
    assert ticket is not None
    assert engine.wait(ticket, GENEROUS_S)
    (result,) = engine.poll()
    return result


class DiskWorld:
    """A disk tier whose blocks are identified by numbers: block n has key n, and bytes derived from n and its group.

    In all methods, the argument `of` is the number of a KV group; the default, 0, is the first group.

    Args:
        more: KV groups besides the first.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        group: DiskGroup | None = None,
        slots: int = 32,
        identity: DiskIdentity = IDENTITY,
        host_slots: int = 64,
        faults: testing_ext.IoFaults | None = None,
        more: Sequence[DiskGroup] = (),
        **options: object,
    ) -> None:
        self.group = group or make_group()
        self.groups = [self.group, *more]
        self.folders = list(folders)
        self.identity = identity
        self.codecs = [codec_of(group, number) for number, group in enumerate(self.groups)]
        images: dict[int, int] = {}
        for slab, codec in zip(slab_numbers(self.groups), self.codecs, strict=True):
            images[slab] = max(codec.image_bytes, images.get(slab, 0))
        self.options = replace(
            DiskOptions(slots * sum(images.values()), **options),  # type: ignore[arg-type]
        )
        self.faults = faults
        self.unit = StripedSlabs.open(self.folders, identity, self.groups, self.options, faults)
        pools = {slab: HostPool(image, host_slots) for slab, image in images.items()}
        self.pools = [pools[slab] for slab in slab_numbers(self.groups)]
        self.pool = self.pools[0]
        for pool in pools.values():
            assert pool.wait_ready(host_slots, GENEROUS_S)
        self.engine = TransferEngine(lanes=[self.unit.lane(self.pools)])
        self.op_ids = itertools.count(1)
        self.durable: set[tuple[int, int]] = set()
        self.events: list[DiskEvents] = []

    @property
    def codec(self) -> c_ext.PageCodec:
        return self.codecs[0]

    @property
    def folder(self) -> Path:
        return unit_folder(self.folders[0], self.identity, self.groups)

    def stripes(self, of: int = 0) -> list[tuple[int, int]]:
        """Returns the offset and the size of each rank's stripe, in bytes."""
        codec = self.codecs[of]
        return [(codec.stripe_offset(rank), size) for rank, size in enumerate(self.groups[of].stripe_bytes)]

    def payload(self, number: int, epoch: int = 0, of: int = 0) -> NDArray[np.uint8]:
        """Returns all bytes of the slot image of block `number` in `epoch`, up to the trailer: the stripes of the
        ranks."""
        size = self.codecs[of].trailer_offset
        words = np.arange(size // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        words += np.uint64(number + (epoch << 32) + (of << 56))
        return words.view(np.uint8)

    def fill(self, slot: int, number: int, epoch: int = 0, of: int = 0) -> None:
        view = self.pools[of].slot(slot)
        view[: self.codecs[of].trailer_offset] = self.payload(number, epoch, of)

    def run(
        self,
        kind: OpKind,
        slots: Sequence[int],
        places: Sequence[int],
        tags: NDArray[np.uint8],
        layerwise: bool = False,
        digests: RunDigests = NO_DIGESTS,
        of: int = 0,
    ) -> OpResult:
        priority = Priority.LOAD if kind is OpKind.DISK_READ else Priority.STORE
        op = TransferOp(
            OpId(next(self.op_ids)),
            kind,
            of,
            priority,
            ids([]),
            ids(slots),
            layerwise,
            ids(places),
            tags,
            digests,
        )
        return run_op(self.engine, op)

    def store(
        self, slots: Sequence[int], places: Sequence[int], tags: NDArray[np.uint8], of: int = 0
    ) -> OpResult:
        """Writes the pages in host slots `slots` to the disk slots `places`."""
        return self.run(OpKind.DISK_WRITE, slots, places, tags, of=of)

    def write(
        self,
        numbers: Sequence[int],
        places: Sequence[int],
        publish: bool = True,
        epoch: int | None = None,
        generations: NDArray[np.uint64] | None = None,
        of: int = 0,
    ) -> tuple[OpResult, NDArray[np.uint64]]:
        """Writes blocks `numbers` to the disk slots `places`. Unless `publish` is False, publishes the blocks whose
        write succeeded."""
        slots = list(range(len(numbers)))
        at = self.unit.epoch if epoch is None else epoch
        for slot, number in zip(slots, numbers, strict=True):
            self.fill(slot, number, at, of)
        if generations is None:
            generations = self.unit.next_generations(len(numbers))
        keys = keys_of(numbers)
        result = self.store(slots, places, make_tags(keys, at, generations, BLOCK_TOKENS), of)
        good = np.setdiff1d(np.arange(len(numbers)), result.failed)
        if publish and len(good):
            assert self.unit.record_publish(
                of,
                keys[good],
                ids(places)[good],
                generations[good],
                np.full(len(good), BLOCK_TOKENS, np.int32),
            )
        return result, generations

    def read(
        self,
        numbers: Sequence[int],
        places: Sequence[int],
        generations: NDArray[np.uint64],
        layerwise: bool = False,
        epoch: int | None = None,
        tokens: int = BLOCK_TOKENS,
        of: int = 0,
    ) -> OpResult:
        """Reads blocks into the upper half of the host pool. Checks the bytes of the blocks whose read succeeded."""
        pool = self.pools[of]
        slots = [pool.slots // 2 + i for i in range(len(numbers))]
        for slot in slots:
            pool.slot(slot)[:] = 0xEE
        at = self.unit.epoch if epoch is None else epoch
        tags = make_tags(keys_of(numbers), at, generations, tokens)
        result = self.run(OpKind.DISK_READ, slots, places, tags, layerwise, of=of)
        failed = set(result.failed.tolist())
        for i, (slot, number) in enumerate(zip(slots, numbers, strict=True)):
            if i not in failed:
                got, wanted = pool.slot(slot), self.payload(number, at, of)
                for begin, size in self.stripes(of):
                    part = slice(begin, begin + size)
                    np.testing.assert_array_equal(got[part], wanted[part], f"block {number}: wrong bytes")
        return result

    def poll(self) -> DiskEvents:
        events = self.unit.poll()
        self.events.append(events)
        for pages in events.durable:
            self.durable.update(zip(pages.places.tolist(), pages.generations.tolist(), strict=True))
        return events

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + GENEROUS_S
        while not condition():
            assert time.monotonic() < deadline, what
            self.poll()
            time.sleep(0.005)

    def wait_durable(self, places: Sequence[int], generations: NDArray[np.uint64]) -> None:
        wanted = set(zip(list(places), generations.tolist(), strict=True))
        self.until(lambda: wanted <= self.durable, f"{wanted - self.durable} did not become durable")

    def read_rows(self, rows: IndexRows) -> dict[int, str]:
        """Reads the page of every row, as a page of the row's group. For each block whose read failed, returns the
        reason, in a dict by the block's number."""
        failed = {}
        step = self.pool.slots // 2
        groups = np.zeros(len(rows), np.int32) if rows.groups is None else rows.groups
        for of in np.unique(groups).tolist():
            named = np.flatnonzero(groups == of)
            for first in range(0, len(named), step):
                part = named[first : first + step]
                numbers = [int.from_bytes(key.tobytes(), "big") for key in rows.keys[part]]
                result = self.read(numbers, rows.places[part].tolist(), rows.generations[part], of=of)
                failed.update({numbers[i]: result.reason for i in result.failed.tolist()})
        return failed

    def close(self) -> bool:
        if self.faults is not None:
            self.faults.release()
        assert self.engine.close(GENEROUS_S)
        done = self.unit.close(GENEROUS_S)
        for pool in set(self.pools):
            pool.close()
        return done


MakeDisks = Callable[..., DiskWorld]
"""Type of the fixture `make_disks`."""
