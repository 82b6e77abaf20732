"""Tests loads and stores that bypass host memory, between disk and the engine's pool. The user must enable them
explicitly, because a page that fails to load costs its request.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from flexkv.errors import TransferError
from tests.unit.adapters.disk_engines import spoil
from tests.unit.tensorrt_llm.group import LONG_S
from tests.unit.tensorrt_llm.world import PROMPT, WHOLE, Make, World, arguments, stored

BLOCKS = WHOLE // 4


def settings(
    folder: Path, mode: str = "async", stores: bool = False, may_fail: bool = True
) -> dict[str, str]:
    return {
        "FLEXKV_DISK_FOLDERS": str(folder),
        "FLEXKV_DISK_BYTES_PER_FOLDER": "4MiB",
        "FLEXKV_DISK_COMPUTE_IF_FASTER": "false",
        "FLEXKV_DISK_GDS": "on",
        "FLEXKV_DISK_GDS_MAY_FAIL_REQUESTS": str(may_fail).lower(),
        "FLEXKV_DISK_GDS_STORES": str(stores).lower(),
        "FLEXKV_LOAD_LOOKUP_WAIT_S": "60",
        "FLEXKV_LOAD_MODE": mode,
    }


def restarted(make_world: Make, environment: dict[str, str]) -> World:
    """Makes a world in which PROMPT is only on disk."""
    eager = arguments(cuda_graph_config=None)
    stored(make_world, environment, llm_args=eager).close()
    world: World = make_world(environment, llm_args=eager)
    world.warm_up()
    return world


def counts(world: World) -> tuple[int, int]:
    """Returns the number of pages that were loaded, and the number that were stored, without passing through host
    memory.
    """
    assert world.scheduler is not None
    disk = world.scheduler.side.ranks.unit.manager.tiers[1].counts  # type: ignore[attr-defined]
    return disk.gds_read, disk.gds_written


@pytest.mark.parametrize("stores", [False, True])
@pytest.mark.parametrize("mode", ["async", "sync", "layerwise"])
def test_blocks_on_disk_are_loaded_without_host_memory(
    make_world: Make, tmp_path: Path, mode: str, stores: bool
) -> None:
    world = restarted(make_world, settings(tmp_path, mode, stores))
    assert world.scheduler is not None
    assert world.hit(world.serve(PROMPT)) == WHOLE
    assert counts(world)[0] == BLOCKS
    world.serve([9_000 + n for n in range(30)])
    ends_s = time.monotonic() + LONG_S
    while stores and counts(world)[1] < BLOCKS:
        assert time.monotonic() < ends_s, "the other prompt never went to disk alone"
        world.scheduler.side.ranks.poll()
        time.sleep(0.001)
    world.check()


@pytest.mark.parametrize("mode", ["async", "layerwise"])
def test_host_blocks_and_those_on_disk_in_one_load(make_world: Make, tmp_path: Path, mode: str) -> None:
    world = restarted(make_world, settings(tmp_path, mode))
    assert world.hit(world.serve(PROMPT[:13])) == 12
    # After a load, the loaded blocks are stored in host memory like computed blocks.
    assert world.hit(world.serve(PROMPT)) == WHOLE
    assert counts(world)[0] == BLOCKS
    world.check()


def test_a_load_between_steps_that_fails_is_never_reported_as_loaded(
    make_world: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = restarted(make_world, settings(tmp_path))
    spoil(tmp_path, [2])
    request = world.request(PROMPT)
    ends_s = time.monotonic() + LONG_S
    with caplog.at_level(logging.WARNING):
        while "load between steps" not in caplog.text:
            assert time.monotonic() < ends_s, "the failure is not said"
            world.executor.step()
    assert f"request {request.request_id}" in caplog.text
    assert "disk miss (data)" in caplog.text
    for _ in range(20):
        world.executor.step()
    assert request.state != "done", "it waits until it is cancelled"
    assert world.executor.wrong == [], "no forward has read its blocks"
    # The failed load does not affect other requests.
    world.serve_beside([9_000 + n for n in range(30)])
    world.executor.cancel(request)
    world.executor.run()
    world.check()


@pytest.mark.parametrize("mode", ["sync", "layerwise"])
def test_a_load_inside_the_step_that_fails_ends_the_step(make_world: Make, tmp_path: Path, mode: str) -> None:
    world = restarted(make_world, settings(tmp_path, mode))
    spoil(tmp_path, [2])
    world.request(PROMPT)
    with pytest.raises(TransferError, match="did not fill blocks"):
        world.executor.run()
    # With layerwise loads, the forward pass reads the failed page, but ends without an output.
    wrong = {position // 4 for _, position in world.executor.wrong}
    assert wrong == ({2} if mode == "layerwise" else set())


def test_without_the_opt_in_blocks_come_through_host_memory(
    make_world: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = restarted(make_world, settings(tmp_path, may_fail=False))
    assert "disk.gds=on is off here" in caplog.text
    assert "disk.gds_may_fail_requests" in caplog.text
    assert world.hit(world.serve(PROMPT)) == WHOLE
    assert counts(world) == (0, 0)
    world.check()
