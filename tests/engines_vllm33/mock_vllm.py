"""Replaces parts of vLLM 0.33: compiled modules, drivers, and code that Triton's interpreter cannot run."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch

from tests.engines_vllm33.engine import overwrite
from tests.engines_vllm33.mock_cuda import CAPABILITY, NAME, SaysCuda, does_nothing, gpus, within
from tests.engines_vllm33.mock_operators import flash_attn_varlen_func

COMPILED = ("_C", "_moe_C", "_C_stable_libtorch", "_moe_C_stable_libtorch", "vllm_flash_attn._vllm_fa3_C")


class CuMemAllocator:
    """Replaces vLLM's allocator for sleep mode. Where the original unmaps the KV memory, this one overwrites it.

    Attributes:
        kv_caches: the tensors that a sleep overwrites.
        asked: the calls of the allocator so far, in order.
    """

    instance: CuMemAllocator | None = None

    def __init__(self) -> None:
        self.kv_caches: list[torch.Tensor] = []
        self.asked: list[str] = []

    @classmethod
    def get_instance(cls) -> CuMemAllocator:
        cls.instance = cls.instance or cls()
        return cls.instance

    def use_memory_pool(self, tag: str | None = None) -> AbstractContextManager[None]:
        return nullcontext()

    def get_current_usage(self) -> int:
        return 0

    def release_pools(self) -> None: ...

    def sleep(self, offload_tags: Any = None) -> None:
        self._take_away(f"sleep {offload_tags}")

    def discard(self, tags: Any) -> None:
        self._take_away(f"discard {tags}")

    def wake_up(self, tags: Any = None) -> None:
        self.asked.append(f"wake_up {tags}")

    def _take_away(self, how: str) -> None:
        self.asked.append(how)
        for cache in self.kv_caches:
            overwrite(cache)


class Memory:
    total, free, used = 80 << 30, 79 << 30, 1 << 30


NVML: dict[str, Any] = {
    "nvmlInit": does_nothing,
    "nvmlShutdown": does_nothing,
    "nvmlDeviceGetCount": gpus,
    "nvmlDeviceGetHandleByIndex": lambda number: number,
    "nvmlDeviceGetCudaComputeCapability": lambda handle: CAPABILITY,
    "nvmlDeviceGetMemoryInfo": lambda handle: Memory,
    "nvmlDeviceGetName": lambda handle: NAME,
    "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
    "nvmlSystemGetDriverVersion": lambda: "580.65",
}


def replace_drivers() -> None:
    for name in COMPILED:
        sys.modules[f"vllm.{name}"] = ModuleType(f"vllm.{name}")
    allocator: Any = ModuleType("vllm.device_allocator.cumem")
    allocator.CuMemAllocator, allocator.cumem_available = CuMemAllocator, True
    sys.modules[allocator.__name__] = allocator
    import triton.backends.nvidia.driver as driver  # type: ignore[import-not-found]

    driver.CudaDriver.is_active = staticmethod(lambda: True)
    import vllm.third_party.pynvml as nvml

    for name, value in NVML.items():
        setattr(nvml, name, value)


def replace_now() -> None:
    import vllm.platforms.cuda as platform

    platform.CudaPlatformBase.dist_backend = "gloo"
    platform.CudaPlatformBase.dispatch_key = "CPU"
    platform.CudaPlatformBase.device_count = classmethod(lambda cls: gpus())
    import vllm.utils.torch_utils as torch_utils

    torch_utils.get_accelerator_view_from_cpu_tensor = lambda tensor: tensor
    import vllm.vllm_flash_attn as attention
    import vllm.vllm_flash_attn.flash_attn_interface as interface

    for name, value in {
        "flash_attn_varlen_func": flash_attn_varlen_func,
        "get_scheduler_metadata": lambda *_, **__: torch.zeros(64, dtype=torch.int32),
        "is_fa_version_supported": lambda version: version == 3,
    }.items():
        setattr(interface, name, value)
        setattr(attention, name, value)


def _sampler(module: Any) -> None:
    """Replaces the kernel for top-k and top-p by vLLM's own PyTorch version. The kernel uses `tl.range`, which Triton's
    interpreter does not support.
    """

    def apply(logits: Any, k: Any, p: Any, *_: Any, **__: Any) -> Any:
        return logits if k is None and p is None else module.apply_top_k_top_p_pytorch(logits, k, p)

    module.apply_top_k_top_p = apply


def _warmup(module: Any) -> None:
    """Removes the warm-up of kernels, which would import the kernels of every model."""
    module.kernel_warmup = does_nothing


def _runner(module: Any) -> None:
    """Removes a trial run of the sampler, with which vLLM measures its memory. In Triton's interpreter it would take a
    second."""
    module.GPUModelRunner._dummy_sampler_run = does_nothing


def _registry(module: Any) -> None:
    """Makes vLLM inspect models in this process. The original uses another process, to keep CUDA out of this one, and
    takes ten seconds.
    """
    module._run_in_subprocess = lambda inspect: inspect()


def _offloading(module: Any) -> None:
    """Makes the handlers see tensors on a GPU, because the original code asserts that the tensors are on a GPU."""
    for name, kind in vars(module).items():
        if name.endswith(("Handler", "Handlers")) and getattr(kind, "__module__", "") == module.__name__:
            kind.__init__ = within(SaysCuda, kind.__init__)


LATER: dict[str, Callable[[Any], None]] = {
    "vllm.v1.sample.ops.topk_topp_sampler": _sampler,
    "vllm.model_executor.warmup.kernel_warmup": _warmup,
    "vllm.v1.worker.gpu.model_runner": _runner,
    "vllm.model_executor.models.registry": _registry,
    "vllm.v1.kv_offload.cpu.gpu_worker": _offloading,
}
"""Patches for modules that cannot be imported yet, by the module's name. Each patch is applied right after its module
is imported."""


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        replace = LATER.pop(fullname, None)
        if replace is None:
            return None
        spec = importlib.util.find_spec(fullname)
        assert spec is not None, fullname
        loader: Any = spec.loader
        assert loader is not None, fullname
        run = loader.exec_module

        def run_and_replace(module: ModuleType) -> None:
            run(module)
            replace(module)

        loader.exec_module = run_and_replace
        return spec


def replace_when_imported() -> None:
    sys.meta_path.insert(0, _Finder())
