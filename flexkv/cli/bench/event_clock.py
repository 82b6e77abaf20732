"""Measures time with the GPU's own clock: events in a stream, through NVIDIA's Python bindings (`flexkv[gpu]`)."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from flexkv.cli.driver_calls import done


class EventClock:
    """A separate stream on a device, with two events in it; use as a context manager, in one thread.

    Args:
        driver: the module `cuda.bindings.driver`.

    Raises:
        DriverRefused: a call of the driver failed. All methods may raise it.
        RuntimeError: there is no driver.
    """

    def __init__(self, driver: Any, device: int) -> None:
        self._driver = driver
        with ExitStack() as made:
            done(driver.cuInit(0), "cuInit")
            number = done(driver.cuDeviceGet(device), "cuDeviceGet")
            context = done(driver.cuDevicePrimaryCtxRetain(number), "cuDevicePrimaryCtxRetain")
            made.callback(lambda: done(driver.cuDevicePrimaryCtxRelease(number), "cuDevicePrimaryCtxRelease"))
            done(driver.cuCtxPushCurrent(context), "cuCtxPushCurrent")
            made.callback(lambda: done(driver.cuCtxPopCurrent(), "cuCtxPopCurrent"))
            # A non-blocking stream, because any other stream and the default stream wait for each other.
            flags = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
            self.stream = done(driver.cuStreamCreate(flags), "cuStreamCreate")
            made.callback(lambda: done(driver.cuStreamDestroy(self.stream), "cuStreamDestroy"))
            self._events = []
            self._events = [self._event(made) for _ in range(2)]
            self._made = made.pop_all()

    def _event(self, made: ExitStack) -> Any:
        event = done(
            self._driver.cuEventCreate(int(self._driver.CUevent_flags.CU_EVENT_DEFAULT)), "cuEventCreate"
        )
        made.callback(lambda: done(self._driver.cuEventDestroy(event), "cuEventDestroy"))
        return event

    def __enter__(self) -> EventClock:
        return self

    def __exit__(self, *_: object) -> None:
        self._made.close()

    def start(self) -> None:
        """Records the first event, after the work that is in the stream so far."""
        self._record(0)

    def stop(self) -> None:
        """Records the second event, after the work that is in the stream so far."""
        self._record(1)

    def seconds(self) -> float:
        """Waits until the stream has reached the second event. Returns the seconds between the two events."""
        done(self._driver.cuEventSynchronize(self._events[1]), "cuEventSynchronize")
        return float(done(self._driver.cuEventElapsedTime(*self._events), "cuEventElapsedTime")) / 1e3

    def _record(self, number: int) -> None:
        done(self._driver.cuEventRecord(self._events[number], self.stream), "cuEventRecord")
