"""Tests errors of the transfer engine on a machine without a GPU. Tests that need a GPU are in tests/gpu/."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from flexkv import c_ext
from flexkv.adapters.common.rank_lanes import open_lanes
from flexkv.config import load_config
from flexkv.errors import CapacityError, ConfigError, ContractError
from flexkv.transfer.engine import TransferEngine, log_choices
from flexkv.transfer.graph import OpKind, TransferGraph
from tests.unit.transfer.transfer_world import World


def test_a_device_that_is_not_there_is_refused_by_name() -> None:
    missing = c_ext.cuda_info()["device_count"]
    with pytest.raises(ConfigError, match=f"CUDA device {missing}: "):
        TransferEngine(device=missing)
    with pytest.raises(ConfigError, match="CUDA device -1: "):
        TransferEngine(device=-1)
    with pytest.raises(ConfigError, match=f"CUDA device {missing}: "):
        c_ext.DeviceMemory(missing, 4096)


@pytest.mark.parametrize("threads", [-1, 0, 17])
def test_a_number_of_digest_threads_out_of_range_is_named(threads: int) -> None:
    """An invalid number of digest threads is an error that names the allowed range. It is raised even without a GPU,
    because the engine checks the number before it looks for the device."""
    with pytest.raises(ConfigError, match=rf"digest_threads={threads}: must be in \[1, 16\]"):
        TransferEngine(device=0, digest_threads=threads)


def test_the_lane_of_a_gpu_is_made_by_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[object, ...]] = []

    def make(*arguments: object) -> None:
        given.append(arguments)
        raise CapacityError("no GPU")

    monkeypatch.setattr(c_ext, "CudaLane", make)
    tensors = [SimpleNamespace(device=SimpleNamespace(type="cuda", index=3))]
    for settings in ({}, {"host.verify_threads": 7, "transfer.copy_kernel": False}):
        with pytest.raises(CapacityError, match="no GPU"):
            open_lanes(load_config(settings, {}), [], tensors, None, [], stream_of=lambda device: 0)  # type: ignore[arg-type]
    assert given == [(3, True, True, 4, None, None), (3, True, False, 7, None, None)]


def test_plain_memory_has_no_stream(world: World) -> None:
    with pytest.raises(ContractError, match="host copy has no streams"):
        world.engine.submit(TransferGraph((world.op(OpKind.D2H, [0]),)), stream=0)
    ticket = world.submit(world.op(OpKind.H2D, [0]))
    with pytest.raises(ContractError, match="no streams"):
        world.engine.wait_layer(ticket, 0, 1.0, stream=0)
    world.results(1)


def test_a_pool_is_not_pinned_where_there_is_no_device(world: World) -> None:
    with pytest.raises(ConfigError, match="CUDA device"):
        world.pool.pin(c_ext.cuda_info()["device_count"])
    assert world.pool.pinned_slots == 0


def test_the_thresholds_are_told() -> None:
    assert c_ext.CUDA_THRESHOLDS["load_portion_bytes"] == 4 << 20
    assert c_ext.CUDA_THRESHOLDS["store_portions_in_flight"] == 3
    assert c_ext.CUDA_THRESHOLDS["store_multiprocessors"] == 1


def test_which_way_copies_go_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "flexkv")
    ways = {"h2d": "kernel for runs below 3 KiB; others in batches", "d2h": "in batches"}
    lane: Any = SimpleNamespace(ways=ways, notes="no copy kernel: switched off")
    log_choices(1, lane)
    assert [record.getMessage() for record in caplog.records] == [
        "cuda:1 H2D: kernel for runs below 3 KiB; others in batches",
        "cuda:1 D2H: in batches",
        "cuda:1: no copy kernel: switched off",
    ]


def test_a_kernel_that_cannot_be_started_is_warned_of_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    notes = "the copy kernel is not used any more: no image"
    both = f"{notes}; the kernel that waits for a layer is not used any more: no image"
    lane = SimpleNamespace(failed_launches=0, notes="batched copies are switched off")
    world.engine.cuda_lane = lane  # type: ignore[assignment]
    for op, (lane.failed_launches, lane.notes) in enumerate(
        [(0, ""), (1, notes), (1, notes), (2, both), (9, both)]
    ):
        world.submit(world.op(OpKind.D2H, [op]))
        world.results(1)
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert said == [f"cuda:{world.engine.device}: {text}" for text in (notes, both)]
    assert world.engine.kernels_given_up == 2
