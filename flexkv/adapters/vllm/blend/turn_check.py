"""Checks at the engine's start that cached rows are rotated correctly on the device of the engine's pool."""

from __future__ import annotations

import numpy as np
import torch

from flexkv.adapters.vllm.blend.pages import BlendPages
from flexkv.blend.base import PLANES
from flexkv.blend.registry import NotBlendable
from flexkv.blend.rotation import RowPlaces, TurnTable
from flexkv.blend.segment_load import SegmentLoad
from flexkv.blend.turned_rows import Stretch
from flexkv.errors import FlexKVError

ROWS, FIRST = 40, 3
"""`ROWS` is the number of rows in the test's segment, `FIRST` the first row that is rotated."""
POSITIONS = 50, 1000
"""The positions in the prompt to which the first and second half of the segment's rows are rotated."""


def check_turning(pages: BlendPages) -> None:
    """Loads rows of random numbers, rotates them through the load pipeline on the pool's device, and compares them with
    rows that the CPU has rotated.

    Preconditions:
        No load or store operation is in flight.

    Raises:
        NotBlendable: the rows do not arrive, or differ from the CPU's; the message says in which layers, or why.
    """
    cache = pages.cache
    rows = min(ROWS, len(cache.staging.free) * cache.block_tokens)
    load = cache.load_staged(rows)
    try:
        (hit,) = load.hits
        cache.staging.rows[:, hit.blocks] = _random_rows(pages, len(hit.blocks))
        half = FIRST + (rows - FIRST) // 2
        stretches = [
            Stretch(hit, FIRST, half - FIRST, POSITIONS[0]),
            Stretch(hit, half, rows - half, POSITIONS[1]),
        ]
        if wrong := _wrong_layers(pages, load, stretches):
            raise NotBlendable(f"rows turned on {pages.device} differ from the CPU's in layers {wrong}")
    except NotBlendable:
        raise
    except Exception as error:  # catches errors of torch and the device, too
        reason = str(error) if isinstance(error, FlexKVError) else f"{type(error).__name__}: {error}"
        raise NotBlendable(f"cached rows cannot be turned on {pages.device}: {reason}") from error
    finally:
        load.close()


def _random_rows(pages: BlendPages, blocks: int) -> np.ndarray:
    room = pages.cache.staging.rows[:, :blocks]
    plain = torch.randn(room.shape, generator=torch.Generator().manual_seed(0)).to(pages.dtype)
    return plain.view(torch.uint8).numpy().view(room.dtype)


def _wrong_layers(pages: BlendPages, load: SegmentLoad, stretches: list[Stretch]) -> list[int]:
    layers, wrong = pages.loaded_rows(load, stretches).open(0), []
    try:
        # The loop checks one layer more than a load has buffers, so that one buffer is reused.
        for layer in range(min(pages.cache.prefetch_layers + 1, pages.cache.shape.layers)):
            found = torch.stack(layers.take(layer)).cpu().view(torch.uint8).numpy()
            wanted = [_turned(pages, stretch, layer) for stretch in stretches]
            if not np.array_equal(found, np.concatenate(wanted, axis=1)):
                wrong.append(layer)
    finally:
        layers.close()
    return wrong


def _turned(pages: BlendPages, stretch: Stretch, layer: int) -> np.ndarray:
    """Returns the rows, rotated by the CPU in one call, [2, rows, heads, bytes of a head]."""
    cache, shape = pages.cache, pages.cache.shape
    old = np.arange(stretch.first, stretch.first + stretch.rows)
    tables = [
        pages.rotation.table(old, np.arange(stretch.rows) + stretch.position),
        TurnTable.copies(stretch.rows),
    ]
    head_bytes = shape.row_bytes // shape.heads
    out = np.empty((PLANES, stretch.rows, shape.heads, shape.head_dim), shape.carrier)
    target = RowPlaces(np.arange(stretch.rows, dtype=np.int64) * shape.row_bytes, head_bytes)
    at = stretch.hit.blocks.astype(np.int64)[old // cache.block_tokens], old % cache.block_tokens
    for plane, table in enumerate(tables):
        # The rows are gathered token by token, which is not the order in which loads copy them.
        rows = np.ascontiguousarray(cache.staging.rows[layer][at[0], plane, at[1]])
        pages.rotation.apply(rows, target, out[plane], target, table)
    return out.view(np.uint8)
