"""Every page that was written to a disk can be read back. If a read fails, it is a miss with a reason."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from flexkv import c_ext
from flexkv.errors import BlockRangeError, ClosedError, ContractError
from flexkv.remote.values import VALUE_VERSION
from flexkv.storage.tags import make_tags
from flexkv.transfer.graph import OpKind, OpStatus
from tests.unit.storage.disk_world import BLOCK_TOKENS, MakeDisks, keys_of, make_group

BACKENDS = ["threads", *(["uring"] if not c_ext.uring_refusal() else [])]


@pytest.mark.parametrize("io", BACKENDS)
@pytest.mark.parametrize("disks", [1, 3])
@pytest.mark.parametrize("run_bytes", [4096, 2304, 40, 131072])
def test_what_is_written_comes_back(make_disks: MakeDisks, io: str, disks: int, run_bytes: int) -> None:
    world = make_disks(disks, group=make_group(run_bytes=run_bytes), io=io)
    numbers, places = list(range(20)), list(range(0, 20))
    result, generations = world.write(numbers, places)
    assert result.status is OpStatus.OK, result.reason
    for layerwise in (False, True):
        got = world.read(numbers, places, generations, layerwise)
        assert got.status is OpStatus.OK, got.reason
    world.wait_durable(places, generations)
    stats = world.unit.stats()
    assert stats.written_pages == 20
    assert stats.read_pages == 40
    assert not any(stats.misses.values())


@pytest.mark.parametrize("ranks", [1, 2])
def test_pages_survive_a_restart_in_order_of_use(make_disks: MakeDisks, ranks: int) -> None:
    world = make_disks(2, group=make_group(ranks=ranks))
    _, generations = world.write(range(10), range(10))
    world.wait_durable(range(10), generations)
    world.unit.record_evict(0, np.array([3], np.int32), generations[3:4])
    assert world.close()
    world = make_disks(2, group=make_group(ranks=ranks))
    rows = world.unit.rows(0)
    assert sorted(rows.places.tolist()) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert set(rows.tokens.tolist()) == {BLOCK_TOKENS}
    assert world.read_rows(rows) == {}
    assert world.unit.next_generations(1)[0] > generations.max()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"numbers": [8]}, "key"),
        ({"places": [6]}, "key"),
        ({"epoch": 1}, "epoch"),
        ({"generation": 1}, "generation"),
        ({"tokens": 5}, "tokens"),
        ({"places": [20]}, "trailer"),
    ],
)
@pytest.mark.parametrize("layerwise", [False, True])
def test_another_page_than_was_asked_for_is_a_miss(
    make_disks: MakeDisks, change: dict[str, object], name: str, layerwise: bool
) -> None:
    world = make_disks()
    _, generations = world.write([7, 9], [5, 6])
    change = dict(change)
    wanted = generations[:1] + np.uint64(int(str(change.pop("generation", 0))))
    asked: dict[str, object] = {"numbers": [7], "places": [5], "generations": wanted, "layerwise": layerwise}
    result = world.read(**{**asked, **change})  # type: ignore[arg-type]
    assert result.failed.tolist() == [0]
    assert f"disk miss ({name})" in result.reason
    assert world.unit.stats().misses[name] == 1


def test_an_expired_page_is_a_miss(make_disks: MakeDisks) -> None:
    world = make_disks()
    world.fill(0, 1)
    generations = world.unit.next_generations(1)
    tags = make_tags(keys_of([1]), 0, generations, BLOCK_TOKENS, expiries=1_000)
    assert world.run(OpKind.DISK_WRITE, [0], [0], tags).status is OpStatus.OK
    assert "disk miss (expired)" in world.read([1], [0], generations).reason


def test_layers_of_one_page_fail_alone(make_disks: MakeDisks) -> None:
    """If the last layer of a page is damaged, only this layer's read fails. The first layer has arrived before, because
    a layerwise read checks a layer only when it reads it."""
    world = make_disks()
    _, generations = world.write([1], [0])
    world.engine.close(30)
    slab = world.folder / "group0.slab"
    offset = world.unit._volumes[0].slabs[0].offset(0)  # type: ignore[union-attr]
    world.close()
    raw = bytearray(slab.read_bytes())
    raw[offset + 7 * 4096] ^= 1
    slab.write_bytes(raw)
    world = make_disks()
    result = world.read([1], [0], generations, layerwise=True)
    assert "damaged run 7 (layer 3)" in result.reason
    base = world.pool.slots // 2
    np.testing.assert_array_equal(world.pool.slot(base)[: 2 * 4096], world.payload(1)[: 2 * 4096])


@pytest.mark.parametrize(
    ("kind", "slots", "places", "layerwise", "error", "text"),
    [
        (OpKind.DISK_READ, [64], [0], False, BlockRangeError, "slot 64"),
        (OpKind.DISK_READ, [0], [32], False, BlockRangeError, "place 32"),
        (OpKind.DISK_READ, [0], [-1], False, BlockRangeError, "place -1"),
        (OpKind.DISK_READ, [0, 0], [1, 2], False, ContractError, "slot 0 is a target of two"),
        (OpKind.DISK_WRITE, [0, 1], [2, 2], False, ContractError, "place 2 is a target of two"),
        (OpKind.DISK_WRITE, [0], [1], True, ContractError, "never layerwise"),
        (OpKind.DISK_WRITE, [0, 1], [1], False, ContractError, "1 places"),
    ],
)
def test_bad_ops_are_refused(
    make_disks: MakeDisks,
    kind: OpKind,
    slots: list[int],
    places: list[int],
    layerwise: bool,
    error: type[Exception],
    text: str,
) -> None:
    world = make_disks()
    tags = make_tags(keys_of(range(len(places))), 0, np.ones(len(places), np.uint64), 1)
    with pytest.raises(error, match=text):
        world.run(kind, slots, places, tags, layerwise)


def test_an_op_for_a_pool_that_was_closed_is_refused(make_disks: MakeDisks) -> None:
    world = make_disks()
    world.pool.native.close()
    with pytest.raises(ClosedError, match="the host pool of its group was closed"):
        world.run(OpKind.DISK_WRITE, [0], [1], make_tags(keys_of([0]), 0, np.ones(1, np.uint64), 1), False)


def test_a_page_of_64_kib_pays_one_sector() -> None:
    group = make_group(layers=16, run_bytes=2048)
    assert sum(group.stripe_bytes) == 64 << 10
    codec = c_ext.PageCodec(list(group.stripe_bytes), list(group.runs))
    assert codec.image_bytes == (64 << 10) + 4096


@pytest.mark.parametrize("run_bytes", [4096, 2304, 18432])
def test_pages_go_past_the_page_cache_whatever_their_geometry(
    make_disks: MakeDisks, tmp_path: Path, run_bytes: int
) -> None:
    """Slabs bypass the page cache for pages of every size, if the file system allows it. One size is 18,432 bytes, that
    of a layer of an MLA model: 4.5 sectors of 4 KiB."""
    try:
        os.close(os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
        possible = True
    except OSError:
        possible = False
    world = make_disks(group=make_group(layers=3, run_bytes=run_bytes, kv=1))
    member = world.unit._volumes[0]
    assert member is not None
    assert member.slabs[0].direct == possible


def test_a_page_that_was_written_again_is_not_the_one_that_an_earlier_tag_names(
    make_disks: MakeDisks,
) -> None:
    world = make_disks()
    _, former = world.write([1], [0])
    _, latter = world.write([1], [0])
    assert "disk miss (generation)" in world.read([1], [0], former).reason
    assert world.read([1], [0], latter).status is OpStatus.OK


def test_a_new_page_format_is_a_new_format_of_values() -> None:
    """A new version of the page format needs a new version of the values in shared stores. A value consists of a page
    and its trailer, but the version in its name is a separate number. Whoever raises the page's version must also raise
    the values' version, and add the new pair to this test.
    """
    assert (c_ext.PAGE_VERSION, VALUE_VERSION) in {(1, 1)}
