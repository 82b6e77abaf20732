"""From one engine's pages to another's: the same numbers in another interior order, or a refusal that says why.

A conversion is exact or it is none: it moves K and V of every token and head as they are, and never computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexkv.c_ext import KvView, PageConversion
from flexkv.errors import GeometryError
from flexkv.layout.format_id import FormatId, Interior

Stripe = NDArray[np.uint8]
"""One rank's bytes of a page, uint8 [stripe bytes], C-contiguous."""

ROW_INTERIORS = (
    Interior.KV_SPLIT_NHD,
    Interior.KV_SPLIT_HND,
    Interior.KV_JOINED_HND,
    Interior.KV_JOINED_NHD,
)
"""Interiors made of rows of K or V of one token and head."""


@dataclass(frozen=True, slots=True)
class PageEncoding:
    """What one rank's stripes hold, and in which order.

    Attributes:
        dtype: of the elements, by name: other dtypes are other numbers, even of the same size.
        layers, heads: of this rank.
        row_bytes: K, or V, of one token and head; 0 where the interior has no rows.
        strides: bytes from one layer, K to V, token and head to the next.
    """

    format_id: FormatId
    dtype: str
    stripe_bytes: int
    layers: int
    heads: int
    row_bytes: int = 0
    strides: tuple[int, int, int, int] = (0, 0, 0, 0)

    @classmethod
    def of_view(cls, view: KvView, format_id: FormatId, heads: int, dtype: str) -> PageEncoding:
        """The encoding of the stripes that `view` makes. K and V have the same head size.

        Raises:
            GeometryError: the stripe is no whole number of such rows, or its layers are not evenly spaced.
        """
        layers, stripe, tokens = view.num_layers, view.stripe_bytes, format_id.interior_tokens
        if format_id.interior not in ROW_INTERIORS:
            return cls(format_id, dtype, stripe, layers, heads)
        rows = layers * 2 * tokens * heads
        if heads < 1 or stripe % rows:
            raise GeometryError(
                f"a stripe of {stripe} bytes is no whole number of rows of {layers} layers, K and V, {tokens} tokens "
                f"and {heads} heads"
            )
        row = stripe // rows
        layer_stride, head_block = _spacing(view, layers, heads, tokens * 2 * row)
        strides = {
            Interior.KV_SPLIT_NHD: (tokens * heads * row, heads * row, row),
            Interior.KV_SPLIT_HND: (tokens * heads * row, row, tokens * row),
            Interior.KV_JOINED_HND: (row, 2 * row, head_block or tokens * 2 * row),
            Interior.KV_JOINED_NHD: (row, heads * 2 * row, 2 * row),
        }[format_id.interior]
        return cls(format_id, dtype, stripe, layers, heads, row, (layer_stride, *strides))


def conversion(source: PageEncoding, target: PageEncoding) -> PageConversion | None:
    """What rewrites a stripe of `source` as one of `target`; None where both hold the same bytes.

    Raises:
        GeometryError: it cannot be exact; says why.
    """
    if source.dtype != target.dtype:
        raise _refusal(f"the elements are {source.dtype} and {target.dtype}")
    if source.format_id == target.format_id and source.strides == target.strides:
        return None
    one, other = source.format_id, target.format_id
    for encoding in (source, target):
        if encoding.format_id.interior not in ROW_INTERIORS:
            owner = f" of {encoding.format_id.owner}" if encoding.format_id.owner else ""
            raise _refusal(
                f"the interior {encoding.format_id.interior.value}{owner} has no rows that we know"
            )
    if one.ranks != other.ranks:
        raise _refusal(f"the heads are split over {one.ranks} and {other.ranks} ranks")
    for name, mine, theirs in (
        ("tokens of an interior unit", one.interior_tokens, other.interior_tokens),
        ("layers", source.layers, target.layers),
        ("heads a rank", source.heads, target.heads),
        ("bytes a row", source.row_bytes, target.row_bytes),
    ):
        if mine != theirs:
            raise _refusal(f"{name} are {mine} and {theirs}")
    counts = (source.layers, 2, one.interior_tokens, source.heads)
    return PageConversion(counts, source.row_bytes, source.strides, target.strides)


def _spacing(view: KvView, layers: int, heads: int, head_bytes: int) -> tuple[int, int]:
    """Bytes from one layer to the next in the stripe, and from one head to the next where heads lie outside layers.

    The second is 0 where a layer's bytes lie together.
    """
    runs = view.runs
    first = np.array([runs[runs[:, 4] == layer, 3].min() for layer in range(layers)])
    if layers == 1:
        return view.stripe_bytes, 0
    spacing = int(first[1] - first[0])
    if not (np.diff(first) == spacing).all():
        raise GeometryError(
            f"the layers start at {first.tolist()[:8]} of the stripe: they are not evenly spaced"
        )
    if spacing == view.stripe_bytes // layers:
        return spacing, 0
    if spacing == head_bytes and heads > 1:
        return spacing, layers * head_bytes
    raise GeometryError(
        f"layers of a stripe are {spacing} bytes apart, which is neither a layer nor a layer's head"
    )


def _refusal(reason: str) -> GeometryError:
    return GeometryError(f"pages cannot be converted exactly: {reason}")
