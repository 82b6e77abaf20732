"""An operation on an engine that blends segments while they are read from disk. It delays the read of one range of
layers of a page until the forward pass has come near that range, and can damage the range.

The engine needs `SEGMENT_FAULTS` in its environment: its disks are then opened with a wrapper that injects faults.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from demo.engine_child import Operation
from flexkv.blend.base import PLANES

from .blend_watch import ask_engine, blend_worker

HANG = 3
_faults: Any = None

if os.environ.get("SEGMENT_FAULTS"):
    from flexkv.storage.striped_slabs import StripedSlabs
    from tests import testing_ext

    _faults = testing_ext.IoFaults([])
    StripedSlabs.open = partial(StripedSlabs.open, wrapper=_faults)  # type: ignore[method-assign]


def _page(segment: list[int], folder: str) -> tuple[Path, int]:
    """Returns the slab file with the first page of a segment, and the page's offset in that file."""
    import numpy as np

    from flexkv.blend.keys import GROUP
    from flexkv.simulation.world import DISK
    from flexkv.storage.header import read_header

    cache = blend_worker()._pages.cache
    index = cache.manager.tiers[DISK].presence
    entries = index.find(GROUP, cache.scheme.keys(np.asarray(segment, np.int64)).whole)
    (slab,) = [each for each in Path(folder).rglob("*.slab") if "segments-" in str(each)]
    header = read_header(str(slab))
    return slab, header.header_bytes + int(index.slots_of(entries)[0]) * header.slot_bytes


def _flip(slab: Path, offset: int) -> None:
    with slab.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 4]))


def blend_streamed(
    llm: Any, request: dict[str, Any], segment: list[int], folder: str, layer: int, damaged: bool = False
) -> dict[str, Any]:
    """Blends a prompt while one read hangs: the read of the first page of `segment`, for the range of layers that
    begins with `layer`. The read continues when the model has run the layer before `layer`.

    Args:
        folder: the folder with the engine's slabs.
        damaged: whether to flip a bit in layer `layer` of the page before the blend.

    Returns:
        ran: the numbers of the model's layers, in the order in which they ran.
        moved: whether pages were still being read when the layer before `layer` had run.
    """
    from tests import testing_ext

    worker = blend_worker()
    forward, pages = worker.forward, worker._pages
    shape = pages.cache.shape
    slab, page = _page(segment, folder)
    at = page + layer * PLANES * pages.cache.block_tokens * shape.row_bytes
    if damaged:
        _flip(slab, at + 77)
    _faults.add(testing_ext.IoFaultRule(HANG, write=False, offset=at))
    ran: list[int] = []
    moved: list[bool] = []

    def look(number: int) -> Any:
        def hook(*given: Any) -> None:
            ran.append(number)
            if number == layer - 1 and not moved:
                moved.append(any(load.moves for load in pages._loads.values()))
                _faults.release()

        return hook

    hooks = [each.register_forward_hook(look(number)) for number, each in enumerate(forward.layers)]
    try:
        answer = ask_engine(llm, request)
    finally:
        _faults.release()
        for hook in hooks:
            hook.remove()
    return {"requests": [answer], "ran": ran, "moved": moved}


OPERATIONS: dict[str, Operation] = {"blend_streamed": blend_streamed}
