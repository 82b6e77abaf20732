"""Hostile values: for each kind of parameter, values that no caller should give and that break careless code."""

from __future__ import annotations

import array
import ctypes
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

INTEGERS = (0, 1, -1, 2, 3, 7, 255, 65535, 2**31 - 1, 2**31, -(2**31) - 1, 2**32 - 1, 2**32)
LONG_INTEGERS = (2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 2**200)
FLOATS = (0.0, -0.0, 0.001, -1.0, float("nan"), float("inf"), float("-inf"), 1e308, 5e-324)
TEXTS = ("", "a\0b", "\ud800", "x" * 300, "x" * 100_000, "é\U0001f600", "lru", "auto", "..", "none/such")
DTYPES = ("u1", "i1", "i4", "u4", "i8", "u8", "f4", "f8", "c16", "?", ">i4", "O", "S3", "i4,u1")


class HostileError(Exception):
    """The error that hostile objects raise. A call may pass it on to its caller."""


class Raising:
    """An object that raises in every protocol that the core may use."""

    def _raise(self, *_: object) -> int:
        raise HostileError("hostile object")

    __index__ = __int__ = __len__ = __getitem__ = __iter__ = __array__ = __buffer__ = __bool__ = _raise  # type: ignore[assignment]
    __float__ = __hash__ = _raise  # type: ignore[assignment]
    __dlpack__ = data_ptr = _raise

    def __repr__(self) -> str:
        raise HostileError("hostile repr")


class Index:
    """An integer that calls `then` when its value is read."""

    def __init__(self, value: int, then: Callable[[], object] = int) -> None:
        self.value, self.then = value, then

    def __index__(self) -> int:
        self.then()
        return self.value


class OnDemand(Sequence[Any]):
    """A sequence that makes its items on demand. If `lengths` are given, successive calls of `len` return them one
    after another, and further calls return the last one. These lengths may be wrong. If no `lengths` are given, `len`
    returns the true length.
    """

    def __init__(self, items: Sequence[object], *lengths: int) -> None:
        self.items, self.lengths = list(items), list(lengths)

    def __len__(self) -> int:
        if len(self.lengths) > 1:
            return self.lengths.pop(0)
        return self.lengths[0] if self.lengths else len(self.items)

    def __getitem__(self, at: Any) -> Any:
        return _copy(self.items[at])


def _copy(item: object) -> object:
    """Returns a new object with the same value. Nothing else refers to it, so it is freed if the core does not keep
    it.
    """
    if isinstance(item, int) and not isinstance(item, bool):
        return int(str(item)) if item < 10**9 else item
    return (*item,) if isinstance(item, tuple) else item


class Tensor:
    """An object like a tensor in host memory. Its attributes and methods return the values in `claims`, which may be
    impossible."""

    dtype, device = "int64", "cpu"

    def __init__(self, **claims: object) -> None:
        self.memory = np.zeros(8, np.int64)
        self.claims = claims

    def is_contiguous(self) -> object:
        return self.claims.get("is_contiguous", True)

    def data_ptr(self) -> object:
        return self.claims.get("data_ptr", self.memory.ctypes.data)

    def numel(self) -> object:
        return self.claims.get("numel", 8)

    def element_size(self) -> object:
        return self.claims.get("element_size", 8)


def integer(rng: random.Random) -> object:
    made: tuple[Callable[[], object], ...] = (
        lambda: rng.choice(INTEGERS),
        lambda: rng.choice(INTEGERS),
        lambda: rng.choice(LONG_INTEGERS),
        lambda: rng.choice((True, "1", b"1", 1.5, None, np.int64(3), np.uint8(3), float("nan"))),
        lambda: Index(rng.choice(INTEGERS)),
        lambda: Raising(),
    )
    return rng.choice(made)()


def floating(rng: random.Random) -> object:
    return rng.choice(
        (rng.choice(FLOATS), rng.choice(FLOATS), rng.choice(LONG_INTEGERS), "1.0", None, Raising())
    )


def text(rng: random.Random) -> object:
    return rng.choice(
        (rng.choice(TEXTS), rng.choice(TEXTS), b"\xff\xfe", b"a\0b", bytearray(b"a"), 1, None, Raising())
    )


def numbers(rng: random.Random, dtype: str = "") -> object:
    """Returns an array that is either invalid, or valid but unusual."""
    kind = dtype if dtype and rng.random() < 0.5 else rng.choice(DTYPES)
    shape = rng.choice(((0,), (1,), (4,), (4, 16), (0, 16), (3, 5), (2, 3), (), (2, 2, 2), (1, 0), (4, 5)))
    try:
        base = np.full(shape, rng.choice((0, 1, 2, 3, 255)), kind)
    except (TypeError, ValueError, OverflowError):
        base = np.zeros(shape, kind)
    bent: tuple[Callable[[], object], ...] = (
        lambda: base,
        lambda: base,
        lambda: base[::-1] if base.ndim else base,
        lambda: np.repeat(base, 2, 0)[::2] if base.ndim else base,
        lambda: np.asfortranarray(base),
        lambda: _frozen(base),
        lambda: _unaligned(base),
        lambda: np.broadcast_to(base.reshape(-1)[:1].sum() if kind in "u1i4u4i8u8f4f8" else 0, (2**40,)),
        lambda: base.tolist(),
        lambda: base.view(np.recarray) if kind == "i4,u1" else np.ma.array(base),  # type: ignore[no-untyped-call]
        lambda: np.full(shape, -1, "i4"),
        lambda: np.full(shape, 2**31 - 1, "i4"),
        lambda: np.full(shape, rng.choice((-1, 2**62, 2**63 - 1, -(2**63))), "i8"),
    )
    return rng.choice(bent)()


def _frozen(base: np.ndarray) -> np.ndarray:
    frozen = base.copy()
    frozen.flags.writeable = False
    return frozen


def _unaligned(base: np.ndarray) -> object:
    if base.dtype.hasobject or not base.size:
        return base
    raw = np.zeros(base.nbytes + 1, np.uint8)
    return np.ndarray(base.shape, base.dtype, raw.data, 1)


def buffer(rng: random.Random) -> object:
    size = rng.choice((0, 1, 512, 1024, 4095, 4096, 8192))
    released = memoryview(bytearray(size))
    released.release()
    made: tuple[Callable[[], object], ...] = (
        lambda: bytes(size),
        lambda: bytearray(size),
        lambda: memoryview(bytearray(size)),
        lambda: memoryview(bytearray(2 * size))[::2],
        lambda: released,
        lambda: array.array("i", range(size // 4)),
        lambda: (ctypes.c_char * size)(),
        lambda: numbers(rng, "u1"),
        lambda: rng.choice((None, "text", 5, Raising(), memoryview(b"ab").cast("b"))),
    )
    return rng.choice(made)()


def sequence(rng: random.Random, items: Sequence[object]) -> object:
    """Returns a sequence of `items`. Some items may be replaced, or the sequence may report wrong lengths or items."""
    given = list(items) * rng.choice((1, 1, 2))
    if given and rng.random() < 0.6:
        given[rng.randrange(len(given))] = anything(rng)
    changing: list[object] = list(given)
    changing.insert(0, Index(1, changing.clear))
    growing: list[object] = list(given)
    growing.insert(0, Index(1, lambda: growing.append(0) if len(growing) < 1000 else None))
    endless: list[object] = []
    endless.append(endless)
    made: tuple[Callable[[], object], ...] = (
        lambda: given,
        lambda: tuple(given),
        lambda: OnDemand(given),
        lambda: OnDemand(given, 2**40),
        lambda: OnDemand(given, -1),
        lambda: OnDemand(given, len(given) + 5),
        lambda: OnDemand(given, len(given), 0),
        lambda: OnDemand(given, len(given), 10_000),
        lambda: changing,
        lambda: growing,
        lambda: endless,
        lambda: _each(given),
        lambda: dict.fromkeys(range(len(given)), 1),
        lambda: [],
        lambda: [*given, None],
        lambda: numbers(rng),
    )
    return rng.choice(made)()


def mapping(rng: random.Random, valid: dict[Any, object]) -> object:
    changing: dict[object, object] = dict(valid)
    changing[Index(1, changing.clear)] = ["a"]
    return rng.choice(
        (changing, dict.fromkeys(range(3), "abc"), {0: [], 1: None}, {2**40: ["a"]}, {"a": ["b"]}, [], None)
    )


def _each(items: Sequence[object]) -> Iterator[object]:
    yield from items


def tensor(rng: random.Random) -> object:
    claims: tuple[dict[str, object], ...] = (
        {"numel": -1},
        {"numel": 2**62},
        {"numel": 2**63},
        {"numel": "8"},
        {"element_size": 0},
        {"element_size": -8},
        {"data_ptr": 0},
        {"data_ptr": 12345},
        {"data_ptr": None},
        {"is_contiguous": None},
    )
    return rng.choice((Tensor(**rng.choice(claims)), Tensor(**rng.choice(claims)), Raising(), numbers(rng)))


def anything(rng: random.Random) -> object:
    made: tuple[Callable[[], object], ...] = (
        lambda: integer(rng),
        lambda: floating(rng),
        lambda: text(rng),
        lambda: numbers(rng),
        lambda: buffer(rng),
        lambda: tensor(rng),
        lambda: rng.choice((None, object(), type, Raising(), ..., {}, set(), [None], (), lambda: None)),
    )
    return rng.choice(made)()
