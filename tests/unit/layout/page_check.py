"""Checks flexkv's view of a pool against an independent description of the same pool."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from flexkv import c_ext

Bytes = NDArray[np.uint8]
ReadPage = Callable[[int], Bytes]
WritePage = Callable[[int, Bytes], None]


def check_view(
    view: c_ext.KvView, pool: Bytes, read_page: ReadPage, write_page: WritePage, seed: int, blocks: int = 3
) -> None:
    """Gathers some blocks into pages, scatters pages into these blocks, and compares every byte of the pages and the
    pool.

    `read_page(b)` and `write_page(b, page)` compute the expected result. They access `pool` only by NumPy indexing.
    """
    random = np.random.default_rng(seed)
    pool[:] = random.integers(0, 256, pool.size, dtype=np.uint8)
    low, high = view.first_block, view.num_blocks
    chosen = random.choice(np.arange(low, high), size=min(blocks, high - low), replace=False)
    for block in chosen.tolist():
        _check_gather(view, block, pool, read_page(block))
        _check_scatter(view, block, pool, write_page, random)
        _check_layers(view, block, pool, random)


def _check_gather(view: c_ext.KvView, block: int, pool: Bytes, expected: Bytes) -> None:
    before = pool.copy()
    guarded = np.full(view.stripe_bytes + 128, 0xA5, np.uint8)
    c_ext.gather(view, block, guarded[64:-64])
    assert expected.size == view.stripe_bytes
    np.testing.assert_array_equal(guarded[64:-64], expected, f"gather of block {block}")
    assert (guarded[:64] == 0xA5).all()
    assert (guarded[-64:] == 0xA5).all()
    np.testing.assert_array_equal(pool, before, f"the pool after a gather of block {block}")


def _check_scatter(
    view: c_ext.KvView, block: int, pool: Bytes, write_page: WritePage, random: np.random.Generator
) -> None:
    page = random.integers(0, 256, view.stripe_bytes, dtype=np.uint8)
    before = pool.copy()
    write_page(block, page)
    expected = pool.copy()
    pool[:] = before
    c_ext.scatter(view, block, page)
    np.testing.assert_array_equal(pool, expected, f"scatter of block {block}")


def _check_layers(view: c_ext.KvView, block: int, pool: Bytes, random: np.random.Generator) -> None:
    """Asserts that a gather of a random range of layers, and a scatter of the same layers, move exactly the bytes of
    these layers' runs."""
    lo = int(random.integers(0, view.num_layers))
    hi = int(random.integers(lo + 1, view.num_layers + 1))
    whole, part = np.zeros(view.stripe_bytes, np.uint8), np.full(view.stripe_bytes, 0x5A, np.uint8)
    c_ext.gather(view, block, whole)
    c_ext.gather_layers(view, lo, hi, block, part)
    expected = np.full(view.stripe_bytes, 0x5A, np.uint8)
    for _, _, size, offset, layer in view.runs.tolist():
        if lo <= layer < hi:
            expected[offset : offset + size] = whole[offset : offset + size]
    np.testing.assert_array_equal(part, expected, f"gather of layers {lo} to {hi}")
    before = pool.copy()
    pool[:] = 0
    c_ext.scatter(view, block, whole)
    all_layers = pool.copy()
    pool[:] = 0
    ranges = [(0, lo), (lo, hi), (hi, view.num_layers)]
    for first, last in ranges:
        if first < last:
            c_ext.scatter_layers(view, first, last, block, whole)
    np.testing.assert_array_equal(pool, all_layers, f"scatter of layers cut at {lo} and {hi}")
    pool[:] = before
