"""A torch device for the layerwise pipelines, with its tensors, streams and events."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from flexkv.transfer.layerwise.base import Event, LayerDevice, Stream
from flexkv.transfer.nvtx import span

LOOK_EVERY_S = 0.0005
"""Seconds between two polls of an event during a wait with a deadline. Polling is needed because CUDA's own wait has no
deadline."""


def torch_stream(device: int) -> int:
    """Returns the stream on which torch enqueues this thread's work on a CUDA device, as a `cudaStream_t`."""
    return int(torch.cuda.current_stream(device).cuda_stream)


class TorchEvent(Event):
    """A recorded event. Its `error` is the error of earlier work on the stream that could not be enqueued or, after a
    wait, the error that the device reported.
    """

    def __init__(self, native: Any, error: str) -> None:
        self.native = native
        self._error = error

    def wait(self, deadline_s: float) -> bool:
        ends_s = time.monotonic() + deadline_s
        try:
            while not self.native.query():
                if time.monotonic() >= ends_s:
                    return False
                time.sleep(LOOK_EVERY_S)
        except RuntimeError as error:
            # The CUDA context is broken, so no copy is in flight any more and the wait is over.
            self._error = self._error or f"the device reported: {error}"
        return True

    @property
    def error(self) -> str:
        return self._error


class TorchStream(Stream):
    """One pipeline's stream. The thread that calls `run` enqueues the work, with this stream as its current stream."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module = module
        self._native = module.Stream(device) if device.type != "cpu" else module.Stream()
        # The new stream waits for the current one, because memory that torch's allocator returns may still be in use by
        # work that was enqueued earlier on the current stream.
        self._native.wait_stream(module.current_stream())
        self._error = ""

    def run(self, work: Callable[[], None], stage: str, layer: int) -> None:
        if self._error:
            return
        try:
            with span(stage), self._module.stream(self._native):
                work()
        except Exception as error:  # an error of a transform or a source makes its layer fail
            self._error = f"{stage} of layer {layer}: {type(error).__name__}: {error}"

    def wait(self, event: Event) -> None:
        assert isinstance(event, TorchEvent), "a stream waits for events of its own device"
        self._native.wait_event(event.native)
        self._error = self._error or event.error

    def record(self) -> TorchEvent:
        native = self._module.Event()
        native.record(self._native)
        return TorchEvent(native, self._error)


class TorchDevice(LayerDevice):
    """A CUDA device, or torch's CPU device. On the CPU, all work is synchronous.

    The memory of a pipeline's sources must stay valid until all work of the pipeline has finished. Copies overlap with
    other work only if that memory is pinned.
    """

    def __init__(self, device: str | torch.device) -> None:
        self._device = torch.device(device)
        self._module: Any = torch.get_device_module(self._device)

    def stream(self, name: str) -> TorchStream:
        return TorchStream(self._module, self._device)

    def buffer(self, shape: Sequence[int], dtype: Any) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def index(self, numbers: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(numbers.copy()).to(self._device)

    def current_stream(self) -> int:
        if self._device.type != "cuda":
            return 0
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def caller_event(self) -> TorchEvent:
        native = self._module.Event()
        native.record(self._module.current_stream())
        return TorchEvent(native, "")

    def caller_waits(self, event: Event, deadline_s: float) -> bool:
        assert isinstance(event, TorchEvent), "a caller waits for events of its own device"
        self._module.current_stream().wait_event(event.native)
        return True


class TensorRows:
    """Rows in one tensor [planes, tokens, heads, head_width]. Copies from and to it are enqueued; no method waits for
    them."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def copy_to(self, rows: torch.Tensor) -> None:
        rows.copy_(self._tensor, non_blocking=True)

    def copy_from(self, rows: torch.Tensor) -> None:
        self._tensor.copy_(rows, non_blocking=True)
