"""Replaces on a CPU the GPU functions that SGLang's HiCache needs: streams and events, registered memory, copies by
index.

This module is a plugin for SGLang that exists only in the tests' environment. Copies are plain indexing in the caller's
thread, so they always happen in the order that streams and events would enforce.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class _Event:
    """An event on a CPU. It is always complete, because on a CPU work has ended when its call returns."""

    def __init__(self, *_arguments: object, **_named: object) -> None: ...
    def record(self, *_stream: object) -> None: ...
    def wait(self, *_stream: object) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: object) -> float:
        return 0.0


class _Stream:
    def __init__(self, *_arguments: object, **_named: object) -> None: ...
    def wait_stream(self, _stream: object) -> None: ...
    def wait_event(self, _event: object) -> None: ...
    def synchronize(self) -> None: ...


@contextmanager
def _on_stream(_stream: object) -> Iterator[None]:
    yield


def _copy_rows(
    *,
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copies token slots of layer-first buffers to token slots of other layer-first buffers."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def _copy_layer_from_pages(
    *,
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copies one layer of pages [pages, layers, page_size, ...] to token slots of layer buffers."""
    pages = src_indices[::page_size] // page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id].reshape(-1, *target.shape[1:])


def _copy_layers_to_pages(
    *,
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copies token slots of all layers to pages [pages, layers, page_size, ...]. `src_ptrs` has all layers of the first
    pool, then all layers of the next pool.
    """
    pages = dst_indices[::page_size] // page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, source in enumerate(src_ptrs):
        target = dst_ptrs[number // layers]
        rows = source[src_indices].reshape(len(pages), page_size, *source.shape[1:])
        target[pages, number % layers] = rows


def activate() -> None:
    """Installs the replacements under the names of SGLang's original functions. Does nothing if there is a GPU."""
    if torch.cuda.is_available():
        return
    cpu: Any = torch.cpu
    cpu.Event, cpu.Stream, cpu.stream = _Event, _Stream, _on_stream
    cpu.current_stream = lambda *_device: _Stream()
    from sglang.srt.mem_cache.pool_host import common, mha

    common._cuda_host_register = lambda *_arguments, **_named: None
    mha.transfer_kv_direct = _copy_rows
    mha.transfer_kv_per_layer_direct_pf_lf = _copy_layer_from_pages
    mha.transfer_kv_all_layer_direct_lf_pf = _copy_layers_to_pages
