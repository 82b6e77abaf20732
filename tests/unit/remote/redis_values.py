"""Values for the tests of the Redis store. Guard bytes around their memory reveal writes outside of a value."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flexkv.remote.base import Part

GUARD_BYTES = 64
GUARD = 0xA5


def drawn(size: int, seed: int) -> Part:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def split(whole: Part, sizes: Sequence[int]) -> list[Part]:
    """Splits `whole` into adjacent parts of these sizes, in bytes, without copying."""
    ends = np.cumsum(sizes)
    assert ends[-1] == len(whole)
    return [whole[end - size : end] for size, end in zip(sizes, ends.tolist(), strict=True)]


class Guarded:
    """Memory for the parts of a value, with guard bytes before and after each part. No call may overwrite the guard
    bytes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._memory = [np.full(size + 2 * GUARD_BYTES, GUARD, np.uint8) for size in sizes]
        self.parts = [memory[GUARD_BYTES:-GUARD_BYTES] for memory in self._memory]

    def bytes(self) -> bytes:
        return b"".join(part.tobytes() for part in self.parts)

    def check(self) -> None:
        for memory in self._memory:
            assert (memory[:GUARD_BYTES] == GUARD).all(), "written to before the part"
            assert (memory[-GUARD_BYTES:] == GUARD).all(), "written to after the part"
