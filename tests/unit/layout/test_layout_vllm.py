"""vLLM's pools: for every order of the axes, each run is copied to the right bytes of the page and back. The error for
a wrong geometry says what is wrong.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flexkv import c_ext
from flexkv.errors import BlockRangeError, GeometryError
from flexkv.layout.format_id import Interior, PageOrder
from flexkv.layout.vllm import VllmGroup, VllmHandler
from flexkv.layout.vllm_order import ORDERS
from tests.unit.layout.page_check import check_view
from tests.unit.layout.vllm_pool import Placement, Pool, Shape, build_pool, pools


def check_pool(pool: Pool, index: int, view: c_ext.KvView, seed: int) -> None:
    check_view(
        view,
        pool.raw,
        lambda b: pool.read_page(index, b),
        lambda b, page: pool.write_page(index, b, page),
        seed,
    )


@settings(deadline=None, max_examples=300)
@given(pools(), st.integers(0, 2**32 - 1))
def test_every_run_maps_to_its_page_bytes_and_back(pool: Pool, seed: int) -> None:
    handler = pool.handler()
    for index in range(handler.num_groups):
        check_pool(pool, index, handler.view(index), seed)


@settings(deadline=None, max_examples=60)
@given(pools(), st.integers(0, 2**32 - 1))
def test_control_a_wrong_view_is_noticed(pool: Pool, seed: int) -> None:
    view = pool.handler().view(0)
    rows = view.runs
    assume(len(rows) > 1 and rows[0, 2] == rows[1, 2])
    rows[[0, 1], 0] = rows[[1, 0], 0]
    wrong = c_ext.KvView(rows, view.num_blocks, view.stripe_bytes)
    with pytest.raises(AssertionError, match="gather of block"):
        check_pool(pool, 0, wrong, seed)


@pytest.mark.parametrize("order", ORDERS)
def test_segments_of_each_order(order: str) -> None:
    pool = build_pool(order, 8, [Shape(4, 2, 16, 64)], 2)
    handler = pool.handler()
    segments = len(handler.view().segments)
    assert segments == {"LHBNC": 4 * 2}.get(order, 1 if order[0] == "B" else 4)
    assert len(handler.view().runs) == 4 * (2 if order in ("LHBNC", "BHLNC") else 1)
    native = handler.format_id().page_order is PageOrder.NATIVE_BLOCK
    assert native == (order == "BHLNC")


def test_the_format_is_the_page_not_the_pool() -> None:
    formats = {o: build_pool(o, 8, [Shape(4, 2, 16, 64)], 2).handler().format_id() for o in ORDERS}
    assert formats["LBHNC"] == formats["LHBNC"] == formats["BLHNC"]
    assert formats["LBNHC"] == formats["BLNHC"]
    assert len(set(formats.values())) == len({str(f) for f in formats.values()}) == 3
    other = build_pool("LBHNC", 8, [Shape(4, 2, 16, 64)], 2).handler(ranks=2).format_id()
    assert other != formats["LBHNC"]
    with pytest.raises(GeometryError, match="owner"):
        build_pool("LBHNC", 8, [Shape(4, 2, 16, 64)], 2).handler(
            [VllmGroup(("p0.l0",), interior=Interior.OPAQUE)]
        )


def test_packed_blocks_of_several_groups_stay_apart() -> None:
    pool = build_pool("BLHNC", 5, [Shape(2, 2, 4, 16), Shape(3, 1, 4, 8)], 2)
    handler = pool.handler()
    assert [len(handler.view(g).segments) for g in (0, 1)] == [1, 1]
    assert handler.view(1).segments[0, 1] == 2 * 2 * 4 * 16 + 3 * 4 * 8


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["LBHNC", "LBNHC"]),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(2, 4),
    st.integers(0, 2**32 - 1),
)
def test_blocks_split_into_kernel_blocks(order: str, blocks: int, heads: int, ratio: int, seed: int) -> None:
    pool = build_pool(order, blocks * ratio, [Shape(3, heads, 4, 16)], 2)
    placement = pool.placements[0]
    whole = Placement(
        placement.size, placement.layers, placement.layer_stride, placement.block_stride * ratio, 0
    )
    handler = VllmHandler(pool.tensors, [whole], [VllmGroup(tuple(whole.layers))], blocks, order)
    view = handler.view()
    assert len(view.segments) == (3 if blocks > 1 else 1)

    def pages(block: int) -> list[np.ndarray]:
        return [pool.page_view(0, block * ratio + piece) for piece in range(ratio)]

    def read(block: int) -> np.ndarray:
        return np.stack(pages(block), axis=1).reshape(-1)

    def write(block: int, page: np.ndarray) -> None:
        parts = page.reshape(3, ratio, *pages(block)[0].shape[1:])
        for piece, target in enumerate(pages(block)):
            target[...] = parts[:, piece]

    check_view(view, pool.raw, read, write, seed)


def test_layers_that_share_kv_are_kept_once() -> None:
    pool = build_pool("LBHNC", 4, [Shape(2, 2, 4, 16)], 2)
    pool.tensors["shared"] = pool.tensors["p0.l1"]
    handler = pool.handler([VllmGroup(("p0.l0", "p0.l1", "shared"))])
    assert len(handler.view().runs) == 2
    assert [handler.layer_number(name) for name in ("p0.l0", "p0.l1", "shared")] == [0, 1, 1]
    check_pool(pool, 0, handler.view(), 1)


def test_groups_may_overlay_the_same_bytes() -> None:
    pool = build_pool("LBHNC", 4, [Shape(2, 2, 4, 16)], 2)
    twin = Placement(
        pool.placements[0].size,
        ["w0", "w1"],
        *[getattr(pool.placements[0], f) for f in ("layer_stride", "block_stride", "offset")],
    )
    pool.tensors |= {"w0": pool.tensors["p0.l0"], "w1": pool.tensors["p0.l1"]}
    handler = pool.handler(
        [VllmGroup(("p0.l0", "p0.l1")), VllmGroup(("w0", "w1"))], placements=[*pool.placements, twin]
    )
    assert (handler.view(0).segments == handler.view(1).segments).all()


def wrong_pools() -> list[tuple[str, dict[str, object]]]:
    pool = build_pool("LBHNC", 4, [Shape(2, 2, 4, 16)], 2)
    good, place = pool.tensors["p0.l1"], pool.placements[0]

    def tensor(**changes: object) -> dict[str, object]:
        return {"caches": pool.tensors | {"p0.l1": good.but(**changes)}}

    def placed(**changes: object) -> dict[str, object]:
        fields = {f: getattr(place, f) for f in Placement.__dataclass_fields__}
        return {"placements": [Placement(**(fields | changes))]}

    return [
        ("order 'NHD'; allowed are LBHNC", {"order": "NHD"}),
        ("byte strides", {"order": "LBNHC"}),
        ("num_blocks is 0", {"num_blocks": 0}),
        ("4 kernel blocks in 3 blocks", {"num_blocks": 3}),
        ("3 dimensions, 4 are needed", tensor(shape=(4, 2, 64))),
        ("dtype int32", tensor(dtype="torch.int32")),
        ("element size 4 does not fit", tensor(item=4)),
        ("empty dimension", tensor(shape=(4, 0, 4, 8))),
        ("allocations", tensor(address=good.address + 2, storage_base=good.storage_base + 2)),
        ("lies 2 bytes from", tensor(address=good.address + 2)),
        ("its allocation has 100 bytes", tensor(storage_size=100)),
        ("byte strides", tensor(strides=(64, 32, 8, 2))),
        ("lies .* bytes from where", placed(layer_stride=place.layer_stride + 64)),
        ("byte strides", placed(block_stride=place.block_stride + 64)),
        ("end at byte", placed(size=place.size - 1)),
        ("'x' has no KV tensor", {"groups": [VllmGroup(("x",))]}),
        ("no layers", {"groups": [VllmGroup(())]}),
        ("no KV cache groups", {"groups": []}),
        ("ranks is 0", {"ranks": 0}),
    ]


@pytest.mark.parametrize(("message", "changes"), wrong_pools(), ids=lambda v: v if isinstance(v, str) else "")
def test_wrong_geometry_is_refused_by_name(message: str, changes: dict[str, object]) -> None:
    pool = build_pool("LBHNC", 4, [Shape(2, 2, 4, 16)], 2)
    arguments = {
        "groups": [VllmGroup(("p0.l0", "p0.l1"))],
        "caches": pool.tensors,
        "placements": pool.placements,
        "num_blocks": 4,
        "order": "LBHNC",
    }
    merged = arguments | changes
    with pytest.raises(GeometryError, match=message):
        VllmHandler(**merged)  # type: ignore[arg-type]


def test_a_group_that_does_not_exist() -> None:
    handler = build_pool("LBHNC", 4, [Shape(2, 2, 4, 16)], 2).handler()
    with pytest.raises(BlockRangeError, match=r"KV group 1: there are groups \[0, 1\)"):
        handler.view(1)
    with pytest.raises(GeometryError, match="'y' belongs to no"):
        handler.layer_number("y")
