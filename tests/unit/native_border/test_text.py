"""Text of any kind goes through: what is no UTF-8 becomes no other error."""

from __future__ import annotations

import numpy as np
import pytest

from flexkv import c_ext
from flexkv.errors import ConfigError, TokenError
from tests.unit.native_border.crash import run


class Odd(str):
    """Its repr cannot be encoded."""

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
