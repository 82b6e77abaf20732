"""Closing a GDS lane closes its files and ends its threads. This holds even if the object that should have used the
lane could not be made.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from flexkv import c_ext
from flexkv.adapters.common.rank_lanes import open_lanes
from flexkv.config import FlexKVConfig, GdsConfig
from flexkv.errors import CapacityError, ClosedError, FlexKVError, GeometryError
from flexkv.facts.ranks import RankPlace
from flexkv.transfer.engine import TransferEngine
from flexkv.transfer.gds_lane import make_gds_lane
from flexkv.transfer.graph import OpKind, OpStatus
from tests.unit.gds.slab_world import Rank, SlabWorld


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SlabWorld]:
    made = SlabWorld([tmp_path])
    yield made
    made.close()


def open_slabs() -> int:
    """Returns how many file descriptors of slabs this process has open."""
    paths = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor with which listdir read the folder
            paths.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum(path.endswith(".slab") for path in paths)


def tensors(kind: str) -> list[SimpleNamespace]:
    return [SimpleNamespace(device=SimpleNamespace(type=kind, index=None))]


def open_rank(world: SlabWorld, kind: str = "cpu", stripe: int = 0) -> TransferEngine:
    lane = make_gds_lane(world.slabs, 0, None, GdsConfig(), views=[world.ranks[0].view])
    return open_lanes(
        FlexKVConfig(),
        [world.ranks[0].view],
        tensors(kind),
        world.pool,
        [RankPlace(stripe, None)],
        stream_of=lambda device: 0,
        gds_lane=lane,
    )


FAILURES: dict[str, tuple[type[FlexKVError], Callable[[SlabWorld], object]]] = {
    "no room for the staging": (
        CapacityError,
        lambda w: make_gds_lane(w.slabs, 0, None, GdsConfig(max_staging_bytes=4096), views=[w.ranks[0].view]),
    ),
    "staging of another view": (
        GeometryError,
        lambda w: make_gds_lane(w.slabs, 0, None, GdsConfig(), views=[Rank(2, 3, 4096, 4, False, 0).view]),
    ),
    "a device without lanes": (GeometryError, lambda w: open_rank(w, kind="xpu")),
    "a stripe beyond the slot": (GeometryError, lambda w: open_rank(w, stripe=1 << 30)),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_start_that_fails_closes_the_slabs_though_its_error_is_held(world: SlabWorld, name: str) -> None:
    error, start = FAILURES[name]
    before = open_slabs()
    with pytest.raises(error) as held:
        start(world)
    assert open_slabs() == before
    assert held.value.__traceback__ is not None


@pytest.mark.parametrize("name", FAILURES)
def test_control_without_the_closes_the_slabs_stay_open(
    world: SlabWorld, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, start = FAILURES[name]
    before = open_slabs()
    with monkeypatch.context() as broken:
        broken.setattr(c_ext.GdsLane, "close", lambda lane: None)
        broken.setattr(TransferEngine, "close", lambda engine, deadline_s: True)
        with pytest.raises(error) as held:
            start(world)
    assert open_slabs() > before
    del held


def test_a_start_that_succeeds_serves_until_its_engine_is_closed(world: SlabWorld) -> None:
    world.store([3], [0])
    before = open_slabs()
    engine = open_rank(world)
    world.engines.append(engine)
    assert open_slabs() > before
    (result,) = world.run(engine, world.op(OpKind.GDS_READ, [3], [5]))
    assert result.status is OpStatus.OK
    assert engine.close(30.0)
    assert open_slabs() == before  # the files are closed although the engine's object still exists


def test_a_closed_lane_refuses_and_may_be_closed_again(world: SlabWorld) -> None:
    before = open_slabs()
    lane = make_gds_lane(world.slabs, 0, None, GdsConfig())
    lane.close()
    lane.close()
    assert (open_slabs(), lane.describe(), lane.staging_bytes) == (before, "closed", 0)
    with pytest.raises(ClosedError, match="the GDS manager is closed"):
        lane.reserve_staging(0, world.ranks[0].view)
    engine = TransferEngine(lanes=[lane])
    engine.attach_view(0, world.ranks[0].view, world.pool, 0)
    world.engines.append(engine)
    (result,) = world.run(engine, world.op(OpKind.GDS_READ, [3], [5]))
    assert "the GDS manager is closed" in result.reason
