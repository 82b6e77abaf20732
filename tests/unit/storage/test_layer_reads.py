"""A layerwise read delivers ranges of layers one after another, and flexkv verifies each range separately."""

from __future__ import annotations

import numpy as np
import pytest

from flexkv.transfer.graph import OpStatus
from tests import testing_ext
from tests.unit.storage.disk_world import CORRUPT, GENEROUS_S, STALL, DiskWorld, MakeDisks, make_group
from tests.unit.storage.layered_pages import LAYERS, PAGES, begin_read


def layer(world: DiskWorld, slot: int, number: int) -> np.ndarray:
    """The bytes of K and V of layer `number` in host slot `slot`."""
    run = int(world.group.runs[0][0][1])
    return world.pool.slot(slot)[number * 2 * run : (number + 1) * 2 * run]


@pytest.mark.parametrize("run_bytes", [4096, 2304])
def test_a_layer_is_in_place_when_wait_layer_says_so(make_disks: MakeDisks, run_bytes: int) -> None:
    """`wait_layer` reports a layer as soon as it is in place, even while the read of a later range of layers hangs."""
    group = make_group(layers=LAYERS, run_bytes=run_bytes)
    faults = testing_ext.IoFaults([])
    world = make_disks(group=group, faults=faults)
    _, generations = world.write(range(PAGES), range(PAGES))
    world.wait_durable(range(PAGES), generations)
    slab = world.unit._volumes[0].slabs[0]  # type: ignore[union-attr]
    last_range = slab.offset(1) + 14 * 2 * run_bytes + 8192
    faults.add(testing_ext.IoFaultRule(STALL, write=False, offset=last_range))
    base = world.pool.slots // 2
    ticket = begin_read(world, range(base, base + PAGES), generations)
    assert faults.wait_stalled(1, GENEROUS_S)
    for number in (0, 1, 2, 5, 6, 13):
        assert world.engine.wait_layer(ticket, number, GENEROUS_S).ok, number
        for page in range(PAGES):
            wanted = world.payload(page)[number * 2 * run_bytes : (number + 1) * 2 * run_bytes]
            np.testing.assert_array_equal(layer(world, base + page, number), wanted)
    assert not world.engine.wait_layer(ticket, 14, 0.05).in_time
    faults.release()
    assert world.engine.wait_layer(ticket, LAYERS - 1, GENEROUS_S).ok
    (result,) = world.engine.poll()
    assert result.status is OpStatus.OK
    for page in range(PAGES):
        size = world.codec.trailer_offset
        np.testing.assert_array_equal(world.pool.slot(base + page)[:size], world.payload(page))


def test_a_page_that_fails_in_a_later_range_is_named_there(make_disks: MakeDisks) -> None:
    world = make_disks(group=make_group(layers=LAYERS), faults=testing_ext.IoFaults([]))
    _, generations = world.write(range(PAGES), range(PAGES))
    slab = world.unit._volumes[0].slabs[0]  # type: ignore[union-attr]
    assert world.faults is not None
    world.faults.add(
        testing_ext.IoFaultRule(CORRUPT, write=False, offset=slab.offset(2) + 6 * 8192, bytes=100, times=1)
    )
    ticket = begin_read(world, range(PAGES, 2 * PAGES), generations)
    assert world.engine.wait(ticket, GENEROUS_S)
    assert [p.tolist() for p in world.engine.wait_layer(ticket, 6, GENEROUS_S).failed.values()] == [[2]]
    (result,) = world.engine.poll()
    assert result.failed.tolist() == [2]
    assert "disk miss (data)" in result.reason
    assert "layer 6" in result.reason


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 15, 16, 17, 48, 80])
def test_every_number_of_layers_can_be_read(make_disks: MakeDisks, layers: int) -> None:
    world = make_disks(group=make_group(layers=layers, run_bytes=1024), slots=4, host_slots=8)
    _, generations = world.write(range(4), range(4))
    result = world.read(range(4), range(4), generations, layerwise=True)
    assert result.status is OpStatus.OK, result.reason
