"""What one token's keys and values are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flexkv.errors import GeometryError

PLANES = 2
"""Keys and values."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one token's keys (or values) of all layers are.

    Attributes:
        dtype: float32, bfloat16 or float16.
    """

    layers: int
    heads: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        if min(self.layers, self.heads, self.head_dim) < 1:
            raise GeometryError(f"{self!r}: layers, heads and head_dim must be at least 1")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise GeometryError(f"dtype {self.dtype}: allowed are float32, bfloat16 and float16")

    def __str__(self) -> str:
        """What tells rows apart, also those of equal size."""
        return f"{self.dtype}.l{self.layers}.h{self.heads}.d{self.head_dim}"

    @property
    def element_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def carrier(self) -> np.dtype:
        """The NumPy dtype whose elements carry the bits; NumPy has no bfloat16."""
        return np.dtype(f"u{self.element_bytes}")

    @property
    def row_bytes(self) -> int:
        return self.heads * self.head_dim * self.element_bytes
