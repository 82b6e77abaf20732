"""Replaces torch.cuda and torch.accelerator. The replacements report one H100 with 8 GiB of memory, which is host
memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any

# These variables must be set before torch and Triton are imported. Then kernels run in Triton's interpreter, and
# nothing is compiled.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
from torch.overrides import TorchFunctionMode

GPU_BYTES = 8 << 30
FREE_BYTES = 6 << 30
NAME = "NVIDIA H100 80GB HBM3"
CAPABILITY = (9, 0)


class Event:
    """An event that is complete as soon as it is recorded."""

    def __init__(self, *_: Any, **options: Any) -> None:
        allowed = {"enable_timing", "blocking", "interprocess", "external", "device"}
        assert allowed.issuperset(options), f"torch.cuda.Event takes no {set(options) - allowed}"
        self._at_s = 0.0

    def record(self, stream: Any = None) -> None:
        self._at_s = time.perf_counter()

    def elapsed_time(self, later: Event) -> float:
        return (later._at_s - self._at_s) * 1e3

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


class Stream:
    """A stream that never has unfinished work."""

    device_index, device_type, stream_id, cuda_stream = 0, 1, 0, 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda:0")

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


class Properties:
    name = NAME
    major, minor = CAPABILITY
    total_memory = GPU_BYTES
    multi_processor_count = 132
    warp_size = 32
    max_threads_per_multi_processor = 2048
    regs_per_multiprocessor = 1 << 16
    shared_memory_per_block_optin = 227 << 10
    shared_memory_per_multiprocessor = 228 << 10
    L2_cache_size = 50 << 20
    is_integrated = pci_bus_id = 0
    gcnArchName = ""
    uuid = "GPU-0"


STREAM = Stream()
STATISTICS = {
    f"{kind}_bytes.all.{moment}": 0 for kind in ("allocated", "reserved") for moment in ("current", "peak")
} | {"num_ooms": 0, "num_alloc_retries": 0}


def gpus() -> int:
    """Returns the number of GPUs in CUDA_VISIBLE_DEVICES."""
    return len(os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(","))


def does_nothing(*_: Any, **__: Any) -> None: ...


def is_zero(*_: Any, **__: Any) -> int:
    return 0


def stream_context(stream: Any) -> AbstractContextManager[None]:
    return nullcontext()


OF_BOTH: dict[str, Any] = {
    "is_available": lambda *_: True,
    "device_count": lambda *_: gpus(),
    "current_stream": lambda *_: STREAM,
    "memory_stats": lambda *_, **__: dict(STATISTICS),
    **dict.fromkeys(("synchronize", "set_stream", "empty_cache", "reset_peak_memory_stats"), does_nothing),
    **dict.fromkeys(
        ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"), is_zero
    ),
}
OF_CUDA: dict[str, Any] = {
    "Stream": Stream,
    "Event": Event,
    "stream": stream_context,
    "default_stream": lambda *_: STREAM,
    "mem_get_info": lambda *_: (FREE_BYTES, GPU_BYTES),
    "get_device_properties": lambda *_: Properties,
    "get_device_capability": lambda *_: CAPABILITY,
    "get_device_name": lambda *_: NAME,
    "is_initialized": lambda *_: True,
    "is_current_stream_capturing": lambda: False,
    **dict.fromkeys(("current_device", "current_blas_handle", "get_sync_debug_mode"), is_zero),
    **dict.fromkeys(
        ("set_device", "manual_seed", "manual_seed_all", "set_sync_debug_mode", "init", "_lazy_init"),
        does_nothing,
    ),
}
OF_ACCELERATOR: dict[str, Any] = {
    "current_accelerator": lambda *_, **__: torch.device("cuda"),
    "current_device_index": is_zero,
    "set_device_index": does_nothing,
    "get_memory_info": lambda *_: (FREE_BYTES, GPU_BYTES),
    "empty_host_cache": does_nothing,
}


def replace_torch() -> None:
    for module, names in (
        (torch.cuda, OF_BOTH | OF_CUDA),
        (torch.accelerator, OF_BOTH | OF_ACCELERATOR),
    ):
        for name, value in names.items():
            setattr(module, name, _of_its_own(name, value))
    torch.cuda.memory.get_allocator_backend = lambda: "native"
    torch._C._accelerator_getAllocatorSettings = lambda: ""
    torch._C._accelerator_setAllocatorSettings = does_nothing
    torch.Event, torch.Stream = Event, Stream
    _enter(HostMemory)


def _of_its_own(name: str, value: Any) -> Any:
    """Copies a function under a new name. Returns other values unchanged. The copy is needed because Dynamo has a table
    of torch's functions, in which each function may occur only once.
    """
    if not isinstance(value, FunctionType):
        return value
    return FunctionType(value.__code__, value.__globals__, name, value.__defaults__, value.__closure__)


def _on_host(argument: Any) -> Any:
    if isinstance(argument, str) and argument.startswith("cuda"):
        return "cpu"
    if isinstance(argument, torch.device) and argument.type == "cuda":
        return torch.device("cpu")
    return argument


class HostMemory(TorchFunctionMode):  # type: ignore[misc]
    """A torch function mode: allocations of GPU memory or of pinned memory return ordinary host memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {name: _on_host(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        name = getattr(func, "__name__", "")
        if name in ("pin_memory", "cuda"):
            return args[0]
        if name == "is_pinned":
            return False
        if name == "record_stream":
            return None
        return func(*map(_on_host, args), **named)


class SaysCuda(TorchFunctionMode):  # type: ignore[misc]
    """A torch function mode: `is_cuda` of every tensor is True."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return True if func == torch.Tensor.is_cuda.__get__ else func(*args, **(kwargs or {}))


def within(mode: type[TorchFunctionMode], function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that it runs within the mode."""

    def run(*args: Any, **named: Any) -> Any:
        with mode():
            return function(*args, **named)

    return run


def _enter(mode: type[TorchFunctionMode]) -> None:
    """Enters a mode permanently, in this thread and in every thread that starts later. Each thread has its own
    modes."""
    mode().__enter__()
    threading.Thread.run = within(mode, threading.Thread.run)  # type: ignore[method-assign]
