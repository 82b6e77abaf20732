"""The basic types of blending: a prompt's segments, the shape of their cached KV, and a lookup's hits.

The keys and values of a segment are computed from the segment alone, and cached as if it began at position 0. So the
cached rows of a segment depend only on its tokens and the namespace. When a prompt contains the segment, the cached
keys are rotated to the segment's position in the prompt. The cached rows do not reflect the text before the segment, so
some of them are computed again (`BlendPlan`). If a promised page does not arrive, the load reports the page's segment
as lost, and the prompt is computed without the cached rows of that segment.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import GeometryError
from flexkv.transfer.base import Ticket

Tokens = NDArray[np.int64]
"""Token ids, int64 [tokens], each in [0, 2**32)."""

PLANES = 2
"""Number of planes of a row: one of keys, one of values."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Consecutive tokens of a prompt.

    Attributes:
        tokens: int64 [tokens].
        reusable: whether the segment may be cached and reused. Separators are not reusable; they are computed in every
            prompt.
    """

    tokens: Tokens
    reusable: bool = True

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class KvShape:
    """Shape of one token's keys (or values) in all layers.

    Attributes:
        layers: number of layers.
        heads: number of KV heads.
        head_dim: elements of one head.
        dtype: name of the dtype: float32, bfloat16 or float16.
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
        """Returns a text that differs for rows of different shape or dtype, even if the rows have equal sizes."""
        return f"{self.dtype}.l{self.layers}.h{self.heads}.d{self.head_dim}"

    @property
    def element_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def carrier(self) -> np.dtype:
        """The unsigned integer dtype of NumPy with the size of one element. Arrays of this dtype hold the elements'
        bits, because NumPy has no bfloat16."""
        return np.dtype(f"u{self.element_bytes}")

    @property
    def row_bytes(self) -> int:
        return self.heads * self.head_dim * self.element_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Hit:
    """The cached leading tokens of a segment, which are being loaded into the staging pool.

    Attributes:
        segment: number of the segment in the lookup.
        tokens: number of tokens.
        blocks: blocks of the staging pool, int32 [blocks], in the order of the tokens.
        tickets: one ticket for the load of the full blocks, and one for the load of the tokens after the last full
            block. A part that is not loaded has no ticket.
        requests: ids of the manager's requests, one per ticket.
        streamed: whether pages were still being read from disk when the load began.
    """

    segment: int
    tokens: int
    blocks: NDArray[np.int32]
    tickets: tuple[Ticket, ...]
    requests: tuple[str, ...]
    streamed: bool = False
