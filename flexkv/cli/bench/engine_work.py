"""The work that an engine does on its device while flexkv copies: a decoding step, a large product, small copies."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexkv.cli.bench.torch_baseline import SMALL_BYTES, load_torch

STEP, PRODUCT, SMALL_D2H, SMALL_H2D = "decoding step", "large product", "small D2H", "small H2D"
LAUNCH = "launch calls of a step"
"""The part of a `STEP`'s time until its calls have returned. It is reported like a kind of work, but is not measured
separately."""
WORKS = (STEP, PRODUCT, SMALL_D2H, SMALL_H2D)
STEP_LAYERS = 64
STEP_ROWS, STEP_WIDTH = 64, 4096
"""Shape of the activations in a decoding step. On an H200, 64 such layers take 0.6 ms, like a step of a small model."""
PRODUCT_SIZE = 8192
"""Number of rows and of columns of the large matrix product, which resembles a product in a prefill. It takes 1.6 ms on
an H200.
"""
PLAIN_STEP_ROWS, PLAIN_STEP_WIDTH, PLAIN_PRODUCT_SIZE = 4, 64, 256
"""The shape of a step and the size of the product for plain memory, where a CPU computes."""
FEWEST = 3
"""The minimum number of repetitions of one kind of work in a window, however short the window is."""


@dataclass(frozen=True, slots=True)
class Window:
    """The times of one kind of work, which was repeated n times.

    Attributes:
        begin_s, end_s: when the window began and ended, by `time.perf_counter`.
        times_ms: float64 [n]: milliseconds from the work's first call until the device had finished the work.
        launch_ms: float64 [n]: milliseconds from the work's first call until all its calls had returned.
    """

    begin_s: float
    end_s: float
    times_ms: NDArray[np.float64]
    launch_ms: NDArray[np.float64]


class EngineWork:
    """An engine's work in torch, on a separate stream; use as a context manager, in one thread.

    Args:
        torch: the module torch; it must be built with CUDA unless `device` is None.
        device: the CUDA device; None for plain memory.

    Attributes:
        stream: handle of the CUDA stream; None for plain memory.
    """

    def __init__(self, torch: Any, device: int | None) -> None:
        self._torch = torch
        self._made = ExitStack()
        self.stream: int | None = None
        self._wait: Callable[[], None] = _nothing
        self._small_out = torch.zeros(SMALL_BYTES, dtype=torch.uint8, pin_memory=device is not None)
        self._small_in = torch.zeros(SMALL_BYTES, dtype=torch.uint8, pin_memory=device is not None)
        try:
            self._calls = self._on_cpu() if device is None else self._on_device(device)
        except BaseException:
            self._made.close()
            raise

    def __enter__(self) -> EngineWork:
        return self

    def __exit__(self, *_: object) -> None:
        self._made.close()

    def run(self, work: str, seconds: float, between: Callable[[], None]) -> Window:
        """Repeats one of `WORKS` for `seconds`, and at least `FEWEST` times.

        Args:
            between: called before each repetition, outside the measured time.
        """
        calls, wait, clock = self._calls[work], self._wait, time.perf_counter
        taken: list[tuple[float, float]] = []
        begin_s = clock()
        while clock() - begin_s < seconds or len(taken) < FEWEST:
            between()
            start_s = clock()
            calls()
            launched_s = clock()
            wait()
            taken.append((clock() - start_s, launched_s - start_s))
        times = np.array(taken) * 1e3
        return Window(begin_s, clock(), times[:, 0], times[:, 1])

    def _on_device(self, device: int) -> dict[str, Callable[[], None]]:
        torch = self._torch
        self._made.enter_context(torch.cuda.device(device))
        stream = torch.cuda.Stream(device)
        self._made.enter_context(torch.cuda.stream(stream))
        self.stream, self._wait = int(stream.cuda_stream), stream.synchronize
        place = f"cuda:{device}"
        layers = self._layers(place, torch.bfloat16, STEP_ROWS, STEP_WIDTH)
        product = self._product(place, torch.bfloat16, PRODUCT_SIZE)
        read, written = (torch.zeros(SMALL_BYTES, dtype=torch.uint8, device=place) for _ in range(2))

        def small_d2h() -> None:
            self._small_out.copy_(read, non_blocking=True)

        def small_h2d() -> None:
            written.copy_(self._small_in, non_blocking=True)

        for _ in range(3):
            layers()
            product()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            layers()

        def step() -> None:
            small_h2d()
            graph.replay()
            small_d2h()

        return {STEP: step, PRODUCT: product, SMALL_D2H: small_d2h, SMALL_H2D: small_h2d}

    def _on_cpu(self) -> dict[str, Callable[[], None]]:
        torch = self._torch
        layers = self._layers("cpu", torch.float32, PLAIN_STEP_ROWS, PLAIN_STEP_WIDTH)
        product = self._product("cpu", torch.float32, PLAIN_PRODUCT_SIZE)
        copy = self._small_out.copy_

        def small() -> None:
            copy(self._small_in)

        def step() -> None:
            small()
            layers()
            small()

        return {STEP: step, PRODUCT: product, SMALL_D2H: small, SMALL_H2D: small}

    def _layers(self, place: str, dtype: Any, rows: int, width: int) -> Callable[[], None]:
        torch = self._torch
        first = torch.randn(rows, width, device=place, dtype=dtype)
        weight = torch.randn(width, width, device=place, dtype=dtype) / width**0.5

        def layers() -> None:
            activations = first
            for _ in range(STEP_LAYERS):
                activations = torch.relu(torch.matmul(activations, weight))

        return layers

    def _product(self, place: str, dtype: Any, size: int) -> Callable[[], None]:
        torch = self._torch
        one, other = (torch.randn(size, size, device=place, dtype=dtype) for _ in range(2))
        target = torch.empty_like(one)

        def product() -> None:
            torch.matmul(one, other, out=target)

        return product


def make_engine_work(device: int | None) -> EngineWork | str:
    """Makes an engine's work. If that is impossible, returns the reason instead."""
    torch = load_torch()
    if torch is None:
        return "torch is not installed"
    if device is not None and not torch.cuda.is_available():
        return "torch was built without CUDA"
    return EngineWork(torch, device)


def _nothing() -> None:
    """Does nothing, because work on the CPU is finished when its call returns. Stands in for the wait for a stream."""
