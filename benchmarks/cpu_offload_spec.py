"""Copies blocks for vLLM's own OffloadingConnector, so that this connector can be measured on a machine where the
engine runs on a CPU.

The scheduler part of vLLM's connector works on every device, but the copies need a GPU. This module makes the copies
with torch's indexed assignment instead. vLLM loads it by the names in the connector's extra config, `spec_module_path`
and `spec_name`.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostCopyWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies between the engine's blocks and host memory. Host memory is divided into chunks of several blocks. Each
    copy is made immediately, in the caller's thread.
    """

    def __init__(self, caches: CanonicalKVCaches, chunks: int, blocks_per_chunk: int) -> None:
        self._tensors = caches.tensors
        self._blocks_per_chunk = blocks_per_chunk
        self._stored = [
            torch.zeros(chunks * blocks_per_chunk, cache.tensor.shape[1], dtype=cache.tensor.dtype)
            for cache in caches.tensors
        ]
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: Any, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: Any, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: Any) -> None:
        """Does nothing, because every copy has finished when the call that submitted it returns."""

    def _copy(self, job_id: Any, engine_spec: Any, host_spec: Any, *, store: bool) -> bool:
        started = time.perf_counter()
        blocks = torch.as_tensor(engine_spec.block_ids).long()
        chunks = torch.as_tensor(host_spec.block_ids).long()
        places = (chunks[:, None] * self._blocks_per_chunk + torch.arange(self._blocks_per_chunk)).flatten()
        # A transfer may begin in the middle of a chunk.
        first = engine_spec.block_indices[0] % self._blocks_per_chunk
        places = places[first : first + len(blocks)]
        moved = 0
        for cache, stored in zip(self._tensors, self._stored, strict=True):
            if store:
                stored[places] = cache.tensor[blocks]
            else:
                cache.tensor[blocks] = stored[places]
            moved += len(blocks) * cache.page_size_bytes
        self._ended.append(TransferResult(job_id, True, moved, time.perf_counter() - started))
        return True


class HostCopySpec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's built-in CPU tier, with `HostCopyWorker` as its worker."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not self._worker:  # type: ignore[has-type]
            self._worker = HostCopyWorker(kv_caches, self.num_chunks, self.blocks_per_chunk)
        return self._worker
