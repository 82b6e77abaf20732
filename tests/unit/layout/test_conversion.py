"""A block is stored from one engine's pool, converted, and loaded into another engine's pool. Then each number of K and
V must be at the right token and head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flexkv import c_ext
from flexkv.errors import GeometryError
from flexkv.layout.conversion import PageEncoding, conversion
from flexkv.layout.format_id import FormatId, Interior
from flexkv.layout.sglang import SglangHandler
from flexkv.layout.trtllm import TrtllmHandler, TrtllmModel
from flexkv.layout.vllm_order import ORDERS
from tests.unit.layout.fake_tensor import fake_tensor
from tests.unit.layout.vllm_pool import Shape, build_pool

BLOCKS, LAYERS, HEADS, TOKENS, SIZE, ITEM = 6, 3, 2, 4, 8, 2
ROW = SIZE * ITEM
Numbers = NDArray[np.uint8]
"""The numbers of one block, as bytes [layers, K and V, tokens, heads, bytes of a row]."""


@dataclass(frozen=True)
class EnginePool:
    """An engine's pool. `block(b)` returns block b as Numbers, by NumPy indexing of the pool."""

    encoding: PageEncoding
    view: Any
    raw: NDArray[np.uint8]
    block: Callable[[int], Numbers]
    keep: Any = None


def vllm(order: str, heads: int = HEADS, layers: int = LAYERS) -> EnginePool:
    pool = build_pool(order, BLOCKS, [Shape(layers, heads, TOKENS, 2 * ROW)], ITEM)
    handler = pool.handler()

    def block(number: int) -> Numbers:
        # The pool is [layers, heads, tokens, K and V, bytes of a row] for one block.
        content = pool.logical[0][:, number].reshape(layers, heads, TOKENS, 2, ROW)
        return content.transpose(0, 3, 2, 1, 4)

    encoding = PageEncoding.of_view(handler.view(), handler.format_id(), heads, "bfloat16")
    return EnginePool(encoding, handler.view(), pool.raw, block, pool)


def vllm_cpu(heads: int = HEADS, layers: int = LAYERS) -> EnginePool:
    """Returns vLLM's pool in the order for its vectorised CPU attention. For each head it has K [elements, tokens],
    then V [tokens, elements]."""
    plain = vllm("LBHNC", heads, layers)
    format_id = replace(plain.encoding.format_id, interior=Interior.K_TRANSPOSED)
    half = TOKENS * ROW

    def block(number: int) -> Numbers:
        content = plain.keep.logical[0][:, number].reshape(layers, heads, 2 * half)
        k = content[..., :half].reshape(layers, heads, SIZE, TOKENS, ITEM).transpose(0, 3, 1, 2, 4)
        v = content[..., half:].reshape(layers, heads, TOKENS, ROW).transpose(0, 2, 1, 3)
        return np.stack([k.reshape(layers, TOKENS, heads, ROW), v], 1)

    encoding = PageEncoding.of_view(plain.view, format_id, heads, "bfloat16")
    return EnginePool(encoding, plain.view, plain.raw, block, plain)


def sglang(heads: int = HEADS, layers: int = LAYERS) -> EnginePool:
    raw = np.zeros(2 * layers * BLOCKS * TOKENS * heads * ROW, np.uint8)
    kv = raw.reshape(2, layers, BLOCKS * TOKENS, heads, ROW)
    tensors = [[fake_tensor(kv[side, layer], raw) for layer in range(layers)] for side in (0, 1)]
    handler = SglangHandler(TOKENS, k_buffers=tensors[0], v_buffers=tensors[1])
    by_page = raw.reshape(2, layers, BLOCKS, TOKENS, heads, ROW)
    encoding = PageEncoding.of_view(handler.view(), handler.format_id(), heads, "bfloat16")
    return EnginePool(encoding, handler.view(), raw, lambda b: by_page[:, :, b].swapaxes(0, 1))


def trtllm(heads: int = HEADS, layers: int = LAYERS) -> EnginePool:
    raw = np.zeros(BLOCKS * layers * 2 * heads * TOKENS * ROW, np.uint8)
    tensor = fake_tensor(raw.reshape(BLOCKS, layers, 2, heads * TOKENS * ROW), raw, ITEM)
    model = TrtllmModel(kv_heads=heads, head_size=SIZE, tokens_per_block=TOKENS)
    handler = TrtllmHandler.from_pool(tensor, model)
    blocks = raw.reshape(BLOCKS, layers, 2, heads, TOKENS, ROW)
    encoding = PageEncoding.of_view(handler.view(), handler.format_id(), heads, "bfloat16")
    return EnginePool(encoding, handler.view(), raw, lambda b: blocks[b].swapaxes(2, 3))


POOLS: dict[str, Callable[..., EnginePool]] = {
    **{f"vllm-{order}": lambda order=order, **kw: vllm(order, **kw) for order in ORDERS},
    "vllm-cpu": vllm_cpu,
    "sglang": sglang,
    "trtllm": trtllm,
}


def move(one: EnginePool, from_block: int, other: EnginePool, to_block: int) -> None:
    """Gathers a block of pool `one` into a page, converts the page if necessary, and scatters it into pool `other`."""
    stripe = np.zeros(one.view.stripe_bytes, np.uint8)
    c_ext.gather(one.view, from_block, stripe)
    rewrite = conversion(one.encoding, other.encoding)
    if rewrite is not None:
        converted = np.full_like(stripe, 0xA5)
        rewrite.convert(stripe, converted)
        stripe = converted
    c_ext.scatter(other.view, to_block, stripe)


@pytest.mark.parametrize(("heads", "layers"), [(HEADS, LAYERS), (1, 3), (3, 1)])
@pytest.mark.parametrize("target", POOLS)
@pytest.mark.parametrize("source", POOLS)
def test_every_pair_of_encodings(source: str, target: str, heads: int, layers: int) -> None:
    one, other = (POOLS[name](heads=heads, layers=layers) for name in (source, target))
    random = np.random.default_rng(5)
    one.raw[:] = random.integers(0, 256, one.raw.size, dtype=np.uint8)
    other.raw[:] = random.integers(0, 256, other.raw.size, dtype=np.uint8)
    before = [np.array(other.block(b)) for b in range(BLOCKS)]
    move(one, 2, other, 4)
    for layer in range(layers):
        for kv in range(2):
            for token in range(TOKENS):
                for head in range(heads):
                    np.testing.assert_array_equal(
                        other.block(4)[layer, kv, token, head],
                        one.block(2)[layer, kv, token, head],
                        err_msg=f"layer {layer} kv {kv} token {token} head {head}",
                    )
    for number in set(range(BLOCKS)) - {4}:
        np.testing.assert_array_equal(other.block(number), before[number])
    one.raw[:] = 0
    move(other, 4, one, 3)
    np.testing.assert_array_equal(one.block(3), other.block(4))


@pytest.mark.parametrize("target", ["vllm-LBHNC", "vllm-LBNHC", "vllm-BHLNC", "vllm-cpu", "trtllm"])
def test_without_conversion_the_numbers_are_elsewhere(target: str) -> None:
    """A control: without a conversion, the numbers are in the wrong places, although the pages of the two pools have
    the same size."""
    one, other = sglang(), POOLS[target]()
    one.raw[:] = np.random.default_rng(5).integers(0, 256, one.raw.size, dtype=np.uint8)
    stripe = np.zeros(one.view.stripe_bytes, np.uint8)
    c_ext.gather(one.view, 2, stripe)
    c_ext.scatter(other.view, 2, stripe)
    assert not np.array_equal(one.block(2), other.block(2))
    assert conversion(one.encoding, other.encoding) is not None


def test_equal_pages_need_none() -> None:
    assert conversion(vllm("LBHNC").encoding, vllm("BLHNC").encoding) is None
    assert conversion(trtllm().encoding, trtllm().encoding) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": "float16"}, "bfloat16 and float16"),
        ({"layers": 4}, "layers are 3 and 4"),
        ({"heads": 4}, "heads a rank are 2 and 4"),
        ({"row_bytes": 32}, "bytes a row are 16 and 32"),
        ({"ranks": 2}, "split over 1 and 2 ranks"),
        ({"interior_tokens": 8}, "tokens of an interior unit are 4 and 8"),
        ({"interior": Interior.LATENT}, "interior latent has no rows"),
        ({"interior": Interior.OPAQUE, "owner": "vllm-cpu-attn"}, "opaque of vllm-cpu-attn"),
    ],
)
def test_what_cannot_be_exact_is_refused(change: dict[str, Any], said: str) -> None:
    source, target = sglang().encoding, trtllm().encoding
    own = {name: change[name] for name in change if hasattr(target, name)}
    rest = {name: change[name] for name in change if name not in own}
    changed = replace(target, **own, format_id=replace(target.format_id, **rest))
    with pytest.raises(GeometryError, match=said):
        conversion(source, changed)


def test_encodings_of_runs_and_formats_of_text_are_the_same() -> None:
    """A page's encoding can be rebuilt from the page's runs and from the text of its format. A slab's header contains
    these two."""
    for pool in (make() for make in POOLS.values()):
        encoding, runs = pool.encoding, pool.view.runs[:, [3, 2, 4]]
        format_id = FormatId.parse(str(encoding.format_id))
        read = PageEncoding.of_runs(runs, pool.view.stripe_bytes, format_id, encoding.heads, encoding.dtype)
        assert read == encoding
    opaque = replace(sglang().encoding.format_id, interior=Interior.OPAQUE, owner="vllm-cpu-attn")
    assert FormatId.parse(str(opaque)) == opaque
    with pytest.raises(GeometryError, match="no format"):
        FormatId.parse("nhd16.layer-major")


Strides = tuple[int, int, int, int]


def order(strides: Strides, v_offset: int, v: Strides | None = None) -> tuple[Strides, Strides, int]:
    return strides, v or strides, v_offset


def test_elements_with_gaps_or_overlaps_are_refused() -> None:
    counts, good = (2, 2, 2, 1), order((64, 8, 16, 8), 32)
    c_ext.PageConversion(counts, 8, good, good)
    for bad in [
        order((64, 8, 8, 8), 32),
        order((64, 8, 24, 8), 32),
        order((128, 8, 16, 8), 32),
        order((-64, 8, 16, 8), 32),
        order((64, 8, 16, 8), 24),
        order((64, 8, 16, 8), 32, (64, 8, 8, 8)),
        order((64, 8, 16, 8), 36),
    ]:
        with pytest.raises(GeometryError, match="without gap or overlap"):
            c_ext.PageConversion(counts, 8, good, bad)
    with pytest.raises(GeometryError, match="0 of an axis"):
        c_ext.PageConversion((2, 0, 2, 1), 8, good, good)
    with pytest.raises(GeometryError, match="0 bytes"):
        c_ext.PageConversion(counts, 0, good, good)


def test_buffers_are_checked() -> None:
    rewrite = c_ext.PageConversion((2, 2, 2, 1), 8, order((64, 8, 16, 8), 32), order((64, 16, 32, 8), 8))
    assert rewrite.stripe_bytes == 128
    page = np.zeros(256, np.uint8)
    for source, target in [(page[:127], page[128:]), (page[:128], page[128:255])]:
        with pytest.raises(GeometryError, match="the buffer has 127 bytes: the stripe has 128"):
            rewrite.convert(source, target)
    with pytest.raises(GeometryError, match="source and target share bytes"):
        rewrite.convert(page[:128], page[64:192])
