"""The core accepts text of any kind. Even if the message of an error contains bytes that are not UTF-8, the error keeps
its type and does not become a UnicodeError.
"""

from __future__ import annotations

import numpy as np
import pytest

from flexkv import c_ext
from flexkv.errors import ConfigError, ContractError, GeometryError, TokenError
from tests.unit.native_border.crash import run


class Odd(str):
    """A string whose `repr` cannot be encoded."""

    def __repr__(self) -> str:
        return "\ud800" * 500


@pytest.mark.parametrize("token", [Odd("a"), "é" * 500, -1])
def test_a_token_is_quoted_whatever_its_text(token: object) -> None:
    chain = c_ext.TokenChain(1)
    with pytest.raises(TokenError, match="token 1 is "):
        chain.extend([5, token])


def test_bytes_of_any_encoding_are_quoted() -> None:
    with pytest.raises(ConfigError, match="io='\ufffd'"):
        c_ext.GDSManager({0: ["x"]}, 1, io=b"\xff")  # type: ignore[arg-type]


def test_a_reason_of_any_encoding_can_be_read_back() -> None:
    codec = c_ext.PageCodec([4096], [np.array([[0, 4096, 0]], np.int64)])
    image = codec.image_bytes
    pool = c_ext.HostPool(image, 2, False, image, False)
    lane = c_ext.DiskLane([codec], [pool], [[], []], "threads", 4, 30.0)
    lane.take_out(1, b"\xff\0bad")  # type: ignore[arg-type]
    assert all(isinstance(reason, str) for _, reason, _, _ in lane.states())


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64])
def test_unaligned_tokens_are_read(dtype: type) -> None:
    raw = np.zeros(8 * 8 + 1, np.uint8)
    tokens: np.ndarray = raw[1 : 1 + 8 * np.dtype(dtype).itemsize].view(dtype)
    tokens[:] = np.arange(8)
    assert not tokens.flags.aligned
    odd, even = c_ext.TokenChain(4), c_ext.TokenChain(4)
    assert odd.extend(tokens) == even.extend(list(range(8))) == 2
    assert (odd.digests == even.digests).all()


@pytest.mark.parametrize(
    "call",
    ["sha256(b''", "HostMover(", "HostPool.attach(", "TokenChain(4).truncate(", "TokenChain(4).extend([]"],
)
def test_a_keyword_that_is_no_text_is_a_type_error(call: str) -> None:
    comma = "" if call.endswith("(") else ", "
    said = run(f"caught(lambda: c_ext.{call}{comma}**{{'\\ud800': 1}}))")
    assert said.startswith(
        "TypeError arguments that fit no signature and cannot be shown: UnicodeEncodeError"
    )


def unaligned(values: list[int], dtype: str) -> np.ndarray:
    raw = np.zeros(len(values) * np.dtype(dtype).itemsize + 1, np.uint8)
    array: np.ndarray = raw[1:].view(dtype)
    array[:] = values
    assert not array.flags.aligned
    return array


def test_unaligned_arrays_are_refused_where_they_are_not_copied() -> None:
    index = c_ext.BlockIndex([4])
    slots = unaligned([0, 1], "i4")
    run = unaligned([4096, 4096, 4096, 0, 0], "i8")
    pool = c_ext.HostPool(4096, 2, False, 4096, False)
    with pytest.raises(ContractError, match="entries do not lie on a boundary of 4 bytes"):
        index.ready(unaligned([1, 2], "u4"))
    with pytest.raises(ContractError, match="slots do not lie"):
        c_ext.in_a_row(slots)
    with pytest.raises(ContractError, match="slots do not lie"):
        pool.settle(slots, 1, True)
    with pytest.raises(GeometryError, match="runs do not lie on a boundary of 8 bytes"):
        c_ext.KvView(run.reshape(1, 5), 1, 4096)
    with pytest.raises(GeometryError, match="runs do not lie"):
        c_ext.PageCodec([4096], [unaligned([0, 4096, 0], "i8").reshape(1, 3)])
