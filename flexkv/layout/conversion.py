"""Finds the conversion of one engine's pages to the order of elements of a different engine. If there is no conversion,
raises an error that says why.

Every conversion is exact: it moves K and V of every token and head unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexkv.c_ext import KvView, PageConversion
from flexkv.errors import GeometryError
from flexkv.layout.format_id import FormatId, Interior
from flexkv.layout.tensor import DTYPE_BYTES

Strides = tuple[int, int, int, int]
"""Bytes from one layer to the next, from one token to the next, from one head to the next, and from one element of a
head to the next."""

ROW_INTERIORS = (
    Interior.KV_SPLIT_NHD,
    Interior.KV_SPLIT_HND,
    Interior.KV_JOINED_HND,
    Interior.KV_JOINED_NHD,
    Interior.K_TRANSPOSED,
)
"""Interiors that consist of rows: the elements of K, or of V, of one token and head."""


@dataclass(frozen=True, slots=True)
class RowOrder:
    """The positions of K and V in a stripe.

    Attributes:
        k: strides of K, which starts at the stripe's first byte.
        v: strides of V.
        v_offset: offset in the stripe at which V starts, in bytes.
    """

    k: Strides
    v: Strides
    v_offset: int

    @classmethod
    def alike(cls, strides: Strides, v_offset: int) -> RowOrder:
        """Returns the order of a stripe in which V has the same strides as K."""
        return cls(strides, strides, v_offset)

    def native(self) -> tuple[Strides, Strides, int]:
        return self.k, self.v, self.v_offset


@dataclass(frozen=True, slots=True)
class PageEncoding:
    """The content of one rank's stripes, and the order of that content.

    Attributes:
        format_id: the format of the pages.
        dtype: name of the elements' dtype. Pages of different dtypes cannot be converted, even if the dtypes have the
            same size.
        stripe_bytes: bytes of a stripe.
        layers: number of layers on this rank.
        heads: number of heads on this rank.
        row_bytes: bytes of K, or of V, of one token and head; 0 if the interior has no rows.
        order: positions of K and V in a stripe; None if the interior has no rows.
    """

    format_id: FormatId
    dtype: str
    stripe_bytes: int
    layers: int
    heads: int
    row_bytes: int = 0
    order: RowOrder | None = None

    @classmethod
    def of_view(cls, view: KvView, format_id: FormatId, heads: int, dtype: str) -> PageEncoding:
        """Returns the encoding of the stripes that are made through `view`. The other arguments and the errors are
        those of `of_runs`."""
        return cls.of_runs(view.runs[:, [3, 2, 4]], view.stripe_bytes, format_id, heads, dtype)

    @classmethod
    def of_runs(
        cls, runs: NDArray[np.int64], stripe_bytes: int, format_id: FormatId, heads: int, dtype: str
    ) -> PageEncoding:
        """Returns the encoding of stripes, given their runs. K and V must have the same head size.

        Args:
            runs: each run's offset in the stripe, length in bytes, and layer, int64 [runs, 3].
            stripe_bytes: bytes of a stripe.
            format_id: the format of the pages.
            heads: number of heads on this rank.
            dtype: name of the elements' dtype.

        Raises:
            GeometryError: the stripe cannot be divided into rows of equal size, or its layers are not evenly spaced.
        """
        layers, tokens = int(runs[:, 2].max()) + 1, format_id.interior_tokens
        if format_id.interior not in ROW_INTERIORS:
            return cls(format_id, dtype, stripe_bytes, layers, heads)
        rows = layers * 2 * tokens * heads
        if rows < 1 or stripe_bytes % rows:
            raise GeometryError(
                f"a stripe of {stripe_bytes} bytes is no whole number of rows of {layers} layers, K and V, {tokens} "
                f"tokens and {heads} heads"
            )
        row = stripe_bytes // rows
        item = DTYPE_BYTES.get(dtype, row)
        layer, head_block = _spacing(runs, stripe_bytes, layers, heads, tokens * 2 * row)
        head = head_block or tokens * 2 * row
        order = {
            Interior.KV_SPLIT_NHD: RowOrder.alike((layer, heads * row, row, item), tokens * heads * row),
            Interior.KV_SPLIT_HND: RowOrder.alike((layer, row, tokens * row, item), tokens * heads * row),
            Interior.KV_JOINED_HND: RowOrder.alike((layer, 2 * row, head, item), row),
            Interior.KV_JOINED_NHD: RowOrder.alike((layer, heads * 2 * row, 2 * row, item), row),
            Interior.K_TRANSPOSED: RowOrder(
                (layer, item, head, tokens * item), (layer, row, head, item), tokens * row
            ),
        }[format_id.interior]
        return cls(format_id, dtype, stripe_bytes, layers, heads, row, order)


def conversion(source: PageEncoding, target: PageEncoding) -> PageConversion | None:
    """Returns the conversion that rewrites a stripe of `source` as a stripe of `target`; None if both stripes hold the
    same bytes.

    Raises:
        GeometryError: there is no exact conversion; the message says why.
    """
    if source.dtype != target.dtype:
        raise _refusal(f"the elements are {source.dtype} and {target.dtype}")
    if source.format_id == target.format_id and source.order == target.order:
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
    assert source.order is not None
    assert target.order is not None
    # A row is moved in one piece if its elements are contiguous in both orders; otherwise element by element.
    elements, size = 1, source.row_bytes
    if Interior.K_TRANSPOSED in (one.interior, other.interior):
        if source.dtype not in DTYPE_BYTES:
            raise _refusal(f"an element of {source.dtype} has a size that we do not know")
        size = DTYPE_BYTES[source.dtype]
        elements = source.row_bytes // size
    counts = (source.layers, one.interior_tokens, source.heads, elements)
    return PageConversion(counts, size, source.order.native(), target.order.native())


def _spacing(
    runs: NDArray[np.int64], stripe_bytes: int, layers: int, heads: int, head_bytes: int
) -> tuple[int, int]:
    """Returns the distances between layers and between heads in a stripe.

    Args:
        runs: see `PageEncoding.of_runs`.
        head_bytes: bytes of K and V of one head in one layer.

    Returns:
        Bytes from one layer to the next, and bytes from one head to the next. The latter is 0 if each layer's bytes are
        contiguous; otherwise the heads are outermost, and each head has a piece for every layer.

    Raises:
        GeometryError: the layers are not evenly spaced.
    """
    first = np.array([runs[runs[:, 2] == layer, 0].min() for layer in range(layers)])
    if layers == 1:
        return stripe_bytes, 0
    spacing = int(first[1] - first[0])
    if not (np.diff(first) == spacing).all():
        raise GeometryError(
            f"the layers start at {first.tolist()[:8]} of the stripe: they are not evenly spaced"
        )
    if spacing == stripe_bytes // layers:
        return spacing, 0
    if spacing == head_bytes and heads > 1:
        return spacing, layers * head_bytes
    raise GeometryError(
        f"layers of a stripe are {spacing} bytes apart, which is neither a layer nor a layer's head"
    )


def _refusal(reason: str) -> GeometryError:
    return GeometryError(f"pages cannot be converted exactly: {reason}")
