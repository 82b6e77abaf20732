"""A unit reads pages of KV groups with different page sizes from a peer's pool and slabs. Each page arrives as a page
of the right group, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flexkv import c_ext
from flexkv.errors import GeometryError
from flexkv.peers.page_formats import UnitPages
from flexkv.peers.pool_reader import OUTCOMES, PoolReader
from flexkv.peers.slab_reader import SlabReader
from flexkv.storage.folder import slab_name
from flexkv.storage.group_tables import codec_of
from flexkv.storage.page_reader import PageReader
from flexkv.storage.peer_folders import GROUP, PeerFolder, open_slab
from flexkv.storage.tags import make_tags
from flexkv.transfer.graph import (
    NO_BLOCKS,
    OpId,
    OpKind,
    OpResult,
    OpStatus,
    Priority,
    TransferGraph,
    TransferOp,
)
from flexkv.transfer.host_pool import HostPool
from tests.read_only_mount import read_only_mount
from tests.unit.peers.live_engines import wait_for
from tests.unit.storage.disk_world import (
    BLOCK_TOKENS,
    IDENTITY,
    DiskWorld,
    ids,
    keys_of,
    sharing_groups,
)

HEADS = [0, 0, 0]
SLOTS = 8
PAGES = 3
"""Number of pages in each KV group. The pages of all groups have the same keys."""


class TwoUnits:
    """Two units with three KV groups each. One unit has the pages, in its host pool `theirs` and on its disk. The other
    one reads them into its pool `ours`.
    """

    def __init__(self, folder: Path, verify: bool = False) -> None:
        self.groups = [replace(group, host_digests=verify) for group in sharing_groups()]
        self.world = DiskWorld([folder], self.groups[0], more=self.groups[1:])
        image_bytes = max(codec.image_bytes for codec in self.world.codecs)
        self.theirs, self.ours = (HostPool(image_bytes, 3 * SLOTS, shared=True) for _ in range(2))
        for pool in (self.theirs, self.ours):
            assert pool.wait_ready(3 * SLOTS, 60.0)
        self.directory = c_ext.PeerDirectory()
        self.board = c_ext.SlotBoard(3 * SLOTS)
        self.readers: list[PageReader] = []

    def close(self) -> None:
        for reader in self.readers:
            reader.close(10.0)
        self.world.close()
        self.theirs.close()
        self.ours.close()

    def show(self, group: int, places: Sequence[int], generations: NDArray[np.uint64] | None = None) -> None:
        count = len(places)
        none = np.zeros(0, np.uint64)
        written = none if generations is None else generations
        tokens = np.full(count, BLOCK_TOKENS, np.uint32)
        self.board.note(ids(places), tokens, written, none, 0)
        self.board.show(ids(places), group, keys_of(range(count)))

    def fill_pool(self) -> None:
        """Writes pages of every group into the peer's pool, with their digests if host memory is verified."""
        for group, codec in enumerate(self.world.codecs):
            for page in range(PAGES):
                slot = self.theirs.slot(group * SLOTS + page)
                slot[: codec.trailer_offset] = self.world.payload(page, of=group)
                if self.groups[group].host_digests:
                    at = codec.digest_offset(0)
                    runs = self.groups[group].runs[0].tolist()
                    made = np.array(
                        [c_ext.run_digest(slot[run : run + size]) for run, size, _ in runs], "<u8"
                    )
                    slot[at : at + made.nbytes] = made.view(np.uint8)
            self.show(group, range(group * SLOTS, group * SLOTS + PAGES))

    def join_pool(self) -> None:
        _, fd, _, file_bytes = self.theirs.native.address()
        offset, per_extent, stride = self.theirs.native.file_layout
        self.directory.add(
            (self.board.fd, self.board.bytes),
            (fd, file_bytes, offset, self.theirs.slot_bytes, per_extent, stride),
            UnitPages(self.groups, HEADS, False).formats_of(self.groups).plain,
        )
        self.directory.follow()

    def pool_reader(self, directory: Any = None) -> PoolReader:
        reader = PoolReader(
            directory or self.directory, lambda peer, group: None, self.groups, self.ours, 8, 30.0
        )
        self.readers.append(reader)
        return reader

    def read(self, reader: PageReader, group: int) -> OpResult:
        slots = ids(range(group * SLOTS, group * SLOTS + PAGES))
        for slot in slots.tolist():
            self.ours.slot(slot)[:] = 0xEE
        tags = make_tags(keys_of(range(PAGES)), 0, np.zeros(PAGES, np.uint64), BLOCK_TOKENS)
        op = TransferOp(
            OpId(1 + group),
            OpKind.DISK_READ,
            group,
            Priority.LOAD,
            NO_BLOCKS,
            slots,
            places=ids(range(PAGES)),
            tags=tags,
        )
        assert reader.submit(TransferGraph((op,))) is not None
        found: list[OpResult] = []

        def ended() -> bool:
            found.extend(reader.poll())
            return bool(found)

        wait_for(ended)
        return found[0]

    def wrong(self, group: int) -> list[int]:
        """Returns the numbers of the group's pages with a wrong copy: its bytes differ from the page, or bytes behind
        the page's end have changed."""
        codec, bad = self.world.codecs[group], []
        for page in range(PAGES):
            slot = self.ours.slot(group * SLOTS + page)
            (stripe,) = self.groups[group].stripe_bytes
            same = np.array_equal(slot[:stripe], self.world.payload(page, of=group)[:stripe])
            if not same or not (slot[codec.image_bytes :] == 0xEE).all():
                bad.append(page)
        return bad


@pytest.fixture
def make_units(tmp_path: Path) -> Iterator[Callable[..., TwoUnits]]:
    made: list[TwoUnits] = []

    def make(**options: Any) -> TwoUnits:
        made.append(TwoUnits(tmp_path / f"disk{len(made)}", **options))
        return made[-1]

    yield make
    for units in made:
        units.close()


@pytest.mark.parametrize("verify", [False, True])
def test_pages_of_each_group_come_from_a_peers_pool(
    make_units: Callable[..., TwoUnits], verify: bool
) -> None:
    units = make_units(verify=verify)
    assert len({codec.image_bytes for codec in units.world.codecs}) == 2, "groups of two sizes"
    units.fill_pool()
    units.join_pool()
    reader = units.pool_reader()
    for group in range(3):
        result = units.read(reader, group)
        assert (result.status, result.failed.tolist()) == (OpStatus.OK, [])
        assert units.wrong(group) == []
        if verify:
            at = units.world.codecs[group].digest_offset(0)
            size = 8 * len(units.groups[group].runs[0])
            for page in range(PAGES):
                number = group * SLOTS + page
                ours, theirs = units.ours.slot(number), units.theirs.slot(number)
                assert np.array_equal(ours[at : at + size], theirs[at : at + size])
    assert dict(zip(OUTCOMES, reader.outcomes.tolist(), strict=True))["copied"] == 3 * PAGES


def test_control_a_reader_that_ignores_the_group_brings_other_bytes(
    make_units: Callable[..., TwoUnits],
) -> None:
    units = make_units()
    units.fill_pool()
    units.join_pool()

    class OneGroup:
        def bring(self, pool: Any, group: int, *pages: Any) -> Any:
            return units.directory.bring(pool, 0, *pages)

    reader = units.pool_reader(OneGroup())
    for group in range(3):
        assert units.read(reader, group).status is OpStatus.OK
        assert units.wrong(group) == ([] if group == 0 else list(range(PAGES)))


@pytest.mark.parametrize("group", range(3))
def test_a_damaged_run_of_any_group_is_seen(make_units: Callable[..., TwoUnits], group: int) -> None:
    units = make_units(verify=True)
    units.fill_pool()
    units.theirs.slot(group * SLOTS + 1)[units.groups[group].stripe_bytes[0] - 1] ^= 1
    units.join_pool()
    reader = units.pool_reader()
    result = units.read(reader, group)
    assert result.failed.tolist() == [1]
    assert "digest" in result.reason


def slabs_of(units: TwoUnits, folder: Path | None = None) -> tuple[PeerFolder, ...]:
    return open_slab((folder or units.world.folder) / slab_name(GROUP), IDENTITY, units.groups, HEADS)


def written(units: TwoUnits) -> list[NDArray[np.uint64]]:
    """Writes pages of every group to the peer's slab and shows them on the peer's board. Returns the generations of
    each group's pages."""
    generations = []
    for group in range(3):
        places = list(range(group * SLOTS, group * SLOTS + PAGES))
        result, of_group = units.world.write(range(PAGES), places, of=group)
        assert result.status is OpStatus.OK
        generations.append(of_group)
        units.show(group, places, of_group)
    units.directory.add((units.board.fd, units.board.bytes), None, [((), ())] * 3)
    units.directory.follow()
    return generations


def slab_reader(units: TwoUnits, group_of: Callable[[int], int], folder: Path | None = None) -> SlabReader:
    slabs = slabs_of(units, folder)
    reader = SlabReader(
        units.directory,
        lambda peer, group: (slabs[group_of(group)],) if peer >= 0 else (),
        units.groups,
        units.ours,
        8,
        30.0,
    )
    units.readers.append(reader)
    return reader


def test_pages_of_each_group_come_from_a_peers_slab(make_units: Callable[..., TwoUnits]) -> None:
    units = make_units()
    generations = written(units)
    reader = slab_reader(units, lambda group: group)
    for group in (2, 0, 1, 2):
        result = units.read(reader, group)
        assert (result.status, result.failed.tolist()) == (OpStatus.OK, [])
        assert units.wrong(group) == []
    # A page of another group with the same key overwrites a page, but the board still shows the old page.
    units.world.unit.record_evict(1, ids([SLOTS + 1]), generations[1][1:2])
    units.world.write([1], [SLOTS + 1], of=2)
    assert units.read(reader, 1).failed.tolist() == [1]


def test_pages_come_from_a_slab_that_is_mounted_read_only(
    make_units: Callable[..., TwoUnits], tmp_path: Path
) -> None:
    units = make_units()
    written(units)
    with read_only_mount(units.world.folder, tmp_path / "seen") as seen:
        with pytest.raises(OSError, match="Read-only"):
            (seen / slab_name(GROUP)).open("r+b")
        result = units.read(slab_reader(units, lambda group: group, seen), 0)
    assert (result.status, result.failed.tolist()) == (OpStatus.OK, [])
    assert units.wrong(0) == []


def test_a_slab_read_as_another_groups_gives_no_page(make_units: Callable[..., TwoUnits]) -> None:
    units = make_units()
    written(units)
    reader = slab_reader(units, lambda group: (group + 1) % 3)
    for group in range(3):
        assert units.read(reader, group).failed.tolist() == list(range(PAGES))


def test_a_slab_of_other_groups_is_refused(make_units: Callable[..., TwoUnits]) -> None:
    units = make_units()
    path = units.world.folder / slab_name(GROUP)
    first, *others = units.groups
    with pytest.raises(GeometryError, match="its number of KV groups is 3, ours 2"):
        open_slab(path, IDENTITY, [first, others[0]], HEADS[:2])
    for changed, why in (
        (
            replace(first, rule="window", reach=5),
            "KV group 0: a hit needs its pages by the rule full, ours by window of 5 pages",
        ),
        (replace(first, signature=b"w"), "KV group 0: its layers are others"),
        (replace(first, block_tokens=8), "KV group 0: its blocks have 16 tokens, ours 8"),
        (replace(first, dtype="float16"), "KV group 0: 'test' is no format of pages"),
    ):
        with pytest.raises(GeometryError, match=why):
            open_slab(path, IDENTITY, [changed, *others], HEADS)


def test_the_formats_of_groups_name_where_their_stripes_lie() -> None:
    groups = sharing_groups()
    formats = UnitPages(groups, HEADS, False).formats_of(groups)
    assert formats.others == ()
    for number, (group, (pieces, runs)) in enumerate(zip(groups, formats.plain, strict=True)):
        offset = codec_of(group, number).stripe_offset(0)
        assert pieces == [(offset, offset, group.stripe_bytes[0])]
        assert runs == []
    with pytest.raises(GeometryError, match="its number of KV groups is 2, ours 3"):
        UnitPages(groups, HEADS, False).formats_of(groups[:2])
