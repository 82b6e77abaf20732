"""The device for plain host memory. Its arrays are NumPy's, and its streams are threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexkv.config.sections import SMALL_MACHINE_CPUS
from flexkv.errors import ClosedError
from flexkv.observe import NamedThread
from flexkv.transfer.layerwise.base import Event, LayerDevice, Stream
from flexkv.transfer.nvtx import span

ONE_THREAD = "layers"
"""The name of the thread if all streams share one."""


class HostEvent(Event):
    """An event of a `HostStream`. It is reached when the stream's thread calls `reach`."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._error = ""

    def wait(self, deadline_s: float) -> bool:
        return self._reached.wait(deadline_s)

    @property
    def error(self) -> str:
        return self._error

    def reach(self, error: str) -> None:
        self._error = error
        self._reached.set()


class HostStream(Stream):
    """Runs one pipeline's work in a thread that it shares with streams of other pipelines.

    There is no deadlock, because work only waits for work that was queued earlier, in any thread. The queue is bounded:
    only a pipeline's steps and its `prefetch` queue work, at most eight entries per layer.
    """

    def __init__(self, queue: SimpleQueue[Callable[[], None] | None]) -> None:
        self._queue = queue
        self._error = ""

    def run(self, work: Callable[[], None], stage: str, layer: int) -> None:
        self._queue.put(lambda: self._do(work, stage, layer))

    def wait(self, event: Event) -> None:
        self._queue.put(lambda: self._await(event))

    def record(self) -> Event:
        event = HostEvent()
        self._queue.put(lambda: event.reach(self._error))
        return event

    def _do(self, work: Callable[[], None], stage: str, layer: int) -> None:
        if self._error:
            return
        try:
            with span(stage):
                work()
        except Exception as error:  # a transform or a source may raise anything
            self._error = f"{stage} of layer {layer}: {type(error).__name__}: {error}"

    def _await(self, event: Event) -> None:
        # Needs no deadline. The event is reached when the work queued before it has ended, and a caller that waits for
        # this stream has its own deadline.
        event.wait(threading.TIMEOUT_MAX)
        self._error = self._error or event.error


class HostDevice(LayerDevice):
    """The host device. All streams with the same name share a thread, `flexkv-<name>`. The first of these streams
    starts the thread, and `close` ends it.

    Args:
        one_thread: whether the streams of all names share one thread, which executes their work in the order in which
            it was queued. Copies then use one CPU and leave the others to the computation. With one thread per name,
            copies finish sooner if CPUs are idle. None: one thread if at most SMALL_MACHINE_CPUS CPUs are available.
    """

    def __init__(self, one_thread: bool | None = None) -> None:
        if one_thread is None:
            one_thread = len(os.sched_getaffinity(0)) <= SMALL_MACHINE_CPUS
        self._one_thread = one_thread
        self._lock = threading.Lock()
        self._queues: dict[str, SimpleQueue[Callable[[], None] | None]] = {}
        self._threads: list[threading.Thread] = []
        self._closed = False

    def stream(self, name: str) -> HostStream:
        with self._lock:
            if self._closed:
                raise ClosedError("the layerwise host device was closed")
            name = ONE_THREAD if self._one_thread else name
            if name not in self._queues:
                queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
                thread = NamedThread(f"flexkv-{name}", _work, (queue,))
                thread.start()
                self._queues[name] = queue
                self._threads.append(thread)
            return HostStream(self._queues[name])

    def buffer(self, shape: Sequence[int], dtype: Any) -> NDArray[Any]:
        return np.empty(shape, dtype=dtype)

    def index(self, numbers: NDArray[Any]) -> NDArray[Any]:
        return numbers

    def caller_event(self) -> Event | None:
        return None

    def caller_waits(self, event: Event, deadline_s: float) -> bool:
        return event.wait(deadline_s)

    def close(self, deadline_s: float) -> bool:
        """Refuses new streams, and ends the threads after their queued work. Returns False if a thread is still running
        after `deadline_s` seconds.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                for queue in self._queues.values():
                    queue.put(None)
        ends_s = time.monotonic() + deadline_s
        for thread in self._threads:
            thread.join(max(0.0, ends_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def _work(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := queue.get()) is not None:
        work()
