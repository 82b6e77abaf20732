"""Makes pools in NumPy memory that have vLLM's layout, with any geometry. Returns their placements and tensors. Tests
compute the expected bytes of a page from such a pool by plain indexing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from flexkv.layout.vllm import VllmGroup, VllmHandler
from tests.unit.layout.fake_tensor import FakeTensor, fake_tensor

AXES = "LBHNC"
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Placement:
    size: int
    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int


@dataclass(frozen=True)
class Shape:
    """A number of layers of the same shape. `content` is the size of one token's row in one head, in bytes."""

    layers: int
    heads: int
    tokens: int
    content: int

    @property
    def page(self) -> int:
        return self.heads * self.tokens * self.content


@dataclass
class Pool:
    order: str
    blocks: int
    item: int
    raw: Bytes
    placements: list[Placement] = field(default_factory=list)
    logical: list[Bytes] = field(default_factory=list)
    tensors: dict[str, FakeTensor] = field(default_factory=dict)

    def handler(self, groups: list[VllmGroup] | None = None, **changes: object) -> VllmHandler:
        groups = groups or [VllmGroup(tuple(p.layers)) for p in self.placements]
        arguments: dict[str, object] = {
            "caches": self.tensors,
            "placements": self.placements,
            "groups": groups,
            "num_blocks": self.blocks,
            "order": self.order,
        }
        return VllmHandler(**(arguments | changes))  # type: ignore[arg-type]

    def page_view(self, index: int, block: int) -> Bytes:
        """Returns a view of the pool: the bytes of a block in placement `index`, with the axes in the page's order."""
        view = self.logical[index][:, block]
        inner = self.order.replace("B", "")
        if inner[0] != "L" and self.order[0] != "B":
            inner = "L" + inner.replace("L", "")
        return view.transpose(["LHNC".index(axis) for axis in inner])

    def read_page(self, index: int, block: int) -> Bytes:
        return np.ascontiguousarray(self.page_view(index, block)).reshape(-1)

    def write_page(self, index: int, block: int, page: Bytes) -> None:
        view = self.page_view(index, block)
        view[...] = page.reshape(view.shape)


def build_pool(
    order: str, blocks: int, shapes: list[Shape], item: int, padding: int = 0, lead: int = 0
) -> Pool:
    """Makes a pool: one allocation with the layers of all `shapes`, one shape after another, as vLLM places them.

    `padding` bytes follow each page; this is possible only in orders that begin with LB. `lead` bytes precede the first
    placement.
    """
    packed = sum(shape.layers * shape.page for shape in shapes)
    block_outermost = order[0] == "B"
    apart = lead + sum(s.layers * blocks * (s.page + padding) for s in shapes)
    size = blocks * packed if block_outermost else apart
    raw = np.zeros(size, np.uint8)
    pool, offset = Pool(order, blocks, item, raw), 0 if block_outermost else lead
    for number, shape in enumerate(shapes):
        sizes = {"L": shape.layers, "B": blocks, "H": shape.heads, "N": shape.tokens, "C": shape.content}
        physical = [sizes[axis] for axis in order]
        if block_outermost:
            span = shape.layers * shape.page
            part = raw.reshape(blocks, packed)[:, offset : offset + span].reshape(physical)
            layer_stride = shape.page if order[1] == "L" else shape.tokens * shape.content
            block_stride = packed
        elif padding:
            region = raw[offset : offset + shape.layers * blocks * (shape.page + padding)]
            part = region.reshape(shape.layers, blocks, -1)[:, :, : shape.page].reshape(physical)
            layer_stride, block_stride = blocks * (shape.page + padding), shape.page + padding
            span = region.size
        else:
            span = shape.layers * blocks * shape.page
            part = raw[offset : offset + span].reshape(physical)
            layer_stride = blocks * shape.page
            block_stride = shape.page if order[1] == "B" else shape.tokens * shape.content
        assert np.shares_memory(part, raw)
        logical = part.transpose([order.index(axis) for axis in AXES])
        names = [f"p{number}.l{i}" for i in range(shape.layers)]
        pool.placements.append(Placement(size, names, layer_stride, block_stride, offset))
        pool.logical.append(logical)
        pool.tensors |= {name: fake_tensor(logical[i], raw, item) for i, name in enumerate(names)}
        offset += span
    return pool


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    return Shape(
        draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 5)), 4 * draw(st.integers(1, 9))
    )


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    order = draw(st.sampled_from(["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]))
    padded = order in ("LBHNC", "LBNHC")
    return build_pool(
        order,
        draw(st.integers(1, 6)),
        draw(st.lists(shapes(), min_size=1, max_size=3)),
        draw(st.sampled_from([1, 2, 4])),
        padding=4 * draw(st.integers(0, 3)) if padded else 0,
        lead=4 * draw(st.integers(0, 5)),
    )
