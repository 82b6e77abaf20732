"""The clock that measures time with CUDA events calls the driver in the right order, and releases all handles. The
tests replace the driver by a stand-in.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flexkv import c_ext
from flexkv.cli.bench import event_rows
from flexkv.cli.bench.event_clock import EventClock
from flexkv.cli.bench.transfer_bench import TransferBench
from flexkv.cli.driver_calls import DriverRefused, done
from flexkv.config import TransferConfig

NO_MEMORY = 2
GIVEN = {
    "cuDeviceGet": 0,
    "cuDevicePrimaryCtxRetain": "context",
    "cuCtxPopCurrent": "context",
    "cuStreamCreate": "stream",
    "cuEventElapsedTime": 2.5,
}


class StandIn:
    """Replaces the driver. Records every call, and makes the calls named `fails` return an error."""

    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUevent_flags = SimpleNamespace(CU_EVENT_DEFAULT=0)

    def __init__(self, fails: str = "") -> None:
        self.fails, self.calls = fails, []  # type: tuple[str, list[tuple[Any, ...]]]
        self.events = 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            if name == self.fails:
                return (NO_MEMORY,)
            if name == "cuEventCreate":
                self.events += 1
                return 0, f"event {self.events}"
            return (0, GIVEN[name]) if name in GIVEN else (0,)

        return call

    def named(self, *names: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] in names]


def balanced(driver: StandIn) -> None:
    for opened, closed in (
        ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease"),
        ("cuCtxPushCurrent", "cuCtxPopCurrent"),
        ("cuStreamCreate", "cuStreamDestroy"),
        ("cuEventCreate", "cuEventDestroy"),
    ):
        made = [call for call in driver.named(opened) if opened != driver.fails]
        assert len(made) == len(driver.named(closed)), opened


def test_time_is_between_two_events_of_its_stream_and_all_is_given_back() -> None:
    driver = StandIn()
    with EventClock(driver, 3) as clock:
        assert clock.stream == "stream"
        clock.start()
        clock.stop()
        assert clock.seconds() == 0.0025
    assert driver.named("cuDeviceGet") == [("cuDeviceGet", 3)]
    assert driver.named("cuEventRecord", "cuEventSynchronize", "cuEventElapsedTime") == [
        ("cuEventRecord", "event 1", "stream"),
        ("cuEventRecord", "event 2", "stream"),
        ("cuEventSynchronize", "event 2"),
        ("cuEventElapsedTime", "event 1", "event 2"),
    ]
    balanced(driver)


@pytest.mark.parametrize(
    "fails", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuStreamCreate", "cuEventCreate"]
)
def test_a_refused_call_is_named_and_what_was_made_is_given_back(fails: str) -> None:
    driver = StandIn(fails)
    with pytest.raises(DriverRefused, match=f"{fails}: {NO_MEMORY}"):
        EventClock(driver, 0)
    balanced(driver)


def test_what_the_driver_refuses_is_a_row_that_says_so() -> None:
    rows = event_rows.measure(StandIn("cuStreamCreate"), 0, None)  # type: ignore[arg-type]
    assert [(row.what, row.gbps, row.note) for row in rows] == [
        ("load, by CUDA events", None, f"cuStreamCreate: {NO_MEMORY}")
    ]


def test_each_run_has_a_row_with_its_share_and_one_that_is_too_long_has_none() -> None:
    found = {32 << 10: (20.0, "kernel", 8), 256 << 10: (40.0, "batch", 0)}
    bench: Any = SimpleNamespace(limit_gbps={"H2D": 50.0}, loads_by_events=lambda run, clock: found.get(run))
    rows = event_rows.measure(StandIn(), 0, bench)
    assert [(row.run_bytes, row.share, row.path, row.multiprocessors) for row in rows] == [
        (32 << 10, 0.4, "kernel", 8),
        (256 << 10, 0.8, "batch", 0),
    ]


def test_a_load_lies_between_start_and_stop() -> None:
    """The clock is started before the load and stopped after it. The load is a real one in plain memory, which has no
    stream.
    """
    asked: list[str] = []
    clock: Any = SimpleNamespace(
        stream=None,
        start=lambda: asked.append("start"),
        stop=lambda: asked.append("stop"),
        seconds=lambda: 0.001,
    )
    bench = TransferBench(None, 1 << 20, 2, TransferConfig())
    found = bench.loads_by_events(32 << 10, clock)
    assert found is not None
    assert found == ((1 << 20) / 0.001 / 1e9, "cpu", 0)
    assert asked == ["start", "stop"] * 3
    assert bench.loads_by_events(1 << 20, clock) is None


def test_plain_memory_has_no_events_and_says_so() -> None:
    (row,) = event_rows.event_rows(None, None)  # type: ignore[arg-type]
    assert (row.gbps, row.note) == (None, "not measured: no GPU")


def test_a_code_is_held_against_success() -> None:
    assert done((0,), "call") is None
    assert done((0, 5), "call") == 5
    with pytest.raises(DriverRefused, match="call: 7"):
        done((7, None), "call")


@pytest.mark.skipif(c_ext.cuda_info()["device_count"] > 0, reason="there is a GPU")
def test_the_real_bindings_without_a_driver_give_a_reason() -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason="the extra flexkv[gpu] is not installed")
    (row,) = event_rows.measure(driver, 0, None)  # type: ignore[arg-type]
    assert row.gbps is None
    assert row.note
