"""vLLM's six physical orders of the logical axes [L, B, H, N, C]: layers, blocks, heads, tokens, content bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

AXES = "LBHNC"
ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


def strides_of_order(
    order: str, shape: Sequence[int], layer_stride: int, block_stride: int
) -> tuple[int, int, int, int, int]:
    """Returns the strides of the axes [L, B, H, N, C] in bytes.

    Args:
        order: the physical order of the axes, outermost first; one of ORDERS.
        shape: sizes of [L, B, H, N, C]; C in bytes.
        layer_stride, block_stride: the strides of L and B. The stride of every other axis follows from the sizes of the
            axes that are inside it in `order`.
    """
    fixed = {"L": layer_stride, "B": block_stride}
    strides = dict.fromkeys(AXES, 0)
    inside = 1
    for axis in reversed(order):
        strides[axis] = fixed.get(axis, inside)
        inside = strides[axis] * shape[AXES.index(axis)]
    return strides["L"], strides["B"], strides["H"], strides["N"], strides["C"]


@dataclass(frozen=True, slots=True)
class PageShape:
    """The shape of one block of one layer: `pieces` kernel blocks of [heads, tokens, content].

    Attributes:
        pieces: number of kernel blocks in the block.
        heads: number of heads.
        tokens: number of tokens of a kernel block.
        content_bytes: bytes of one token and head.
        piece_stride, head_stride, token_stride: bytes from one kernel block, head or token to the next.
    """

    pieces: int
    heads: int
    tokens: int
    content_bytes: int
    piece_stride: int
    head_stride: int
    token_stride: int


def runs_of_page(page: PageShape) -> Iterator[tuple[int, int]]:
    """Yields the contiguous runs of a block as (offset from the block's first byte, bytes), in order of their
    offsets."""
    # The stride of a dimension of size 1 is meaningless, so such a dimension never splits a run.
    dims = [
        (count, stride)
        for count, stride in (
            (page.pieces, page.piece_stride),
            (page.heads, page.head_stride),
            (page.tokens, page.token_stride),
        )
        if count > 1
    ]
    dims.sort(key=lambda dim: dim[1])
    run_bytes = page.content_bytes
    while dims and dims[0][1] == run_bytes:
        run_bytes *= dims.pop(0)[0]
    outer = [[i * stride for i in range(count)] for count, stride in reversed(dims)]
    for offsets in product(*outer):
        yield sum(offsets), run_bytes
