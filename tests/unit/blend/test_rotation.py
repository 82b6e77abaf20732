"""Keys are rotated by the right angle, for every dtype, pairing and alignment. The CPU's code and the GPU's code give
the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import flexkv.blend.rotation
from flexkv.blend.rope import RopeSpec
from flexkv.blend.rotation import KeyRotation, RowPlaces, TurnTable
from flexkv.errors import BlockRangeError, GeometryError
from tests import testing_ext
from tests.unit.blend.rope_reference import decode, encode, relative_error, turned

LIMITS = {"float32": 1e-6, "bfloat16": 2.6e-3, "float16": 3.3e-4}


def spec_of(pairing: str = "neox", head_dim: int = 128, rotary_dim: int | None = None) -> RopeSpec:
    return RopeSpec(head_dim, rotary_dim or head_dim, 10_000.0, pairing=pairing)  # type: ignore[arg-type]


def dense(rotation: KeyRotation, rows: int) -> RowPlaces:
    head_bytes = rotation.row_bytes // rotation.heads
    return RowPlaces(np.arange(rows, dtype=np.int64) * rotation.row_bytes, head_bytes)


@contextmanager
def rotated(lane_by_lane: bool) -> Iterator[None]:
    """In the `with` block, rotations run as usual or, with `lane_by_lane`, with the GPU's function compiled for the
    CPU.
    """

    def by_lanes(*tensors: object, stream: int, **geometry: Any) -> None:
        assert stream == 0
        testing_ext.rotate_rows(*tensors, **geometry)

    with pytest.MonkeyPatch.context() as patch:
        if lane_by_lane:
            patch.setattr(flexkv.blend.rotation, "rotate_rows", by_lanes)
        yield


def rotate(
    rotation: KeyRotation, keys: NDArray, old: NDArray, new: NDArray, lane_by_lane: bool = False
) -> NDArray:
    answer = np.zeros_like(keys)
    places = dense(rotation, len(keys))
    table = rotation.table(old, new)
    with rotated(lane_by_lane):
        rotation.apply(keys, places, answer, places, table)
    return answer


def positions(rows: int, most: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, most, rows)


@pytest.mark.parametrize("pairing", ["neox", "gptj"])
@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(128, 128), (64, 32), (80, 20), (6, 6), (10, 6)])
def test_error_against_float64(pairing: str, dtype: str, head_dim: int, rotary_dim: int) -> None:
    spec = spec_of(pairing, head_dim, rotary_dim)
    rotation = KeyRotation(spec, 3, dtype)
    old, new = positions(50, 30_000, 1), positions(50, 30_000, 2)
    plain = np.random.default_rng(0).standard_normal((50, 3, head_dim))
    before = turned(plain, spec, old, rotation.frequencies)
    wanted = turned(plain, spec, new, rotation.frequencies)
    rounded = decode(encode(before, dtype), dtype)
    found = decode(rotate(rotation, encode(before, dtype), old, new), dtype)
    # The limit allows for the rounding of the cached keys to the dtype before the rotation.
    assert relative_error(found, wanted) <= LIMITS[dtype]
    np.testing.assert_array_equal(found[..., rotary_dim:], rounded[..., rotary_dim:])
    # The control: a rotation with the other pairing has a large error.
    other = KeyRotation(spec_of({"neox": "gptj", "gptj": "neox"}[pairing], head_dim, rotary_dim), 3, dtype)
    assert relative_error(decode(rotate(other, encode(before, dtype), old, new), dtype), wanted) > 0.1


@pytest.mark.parametrize("pairing", ["neox", "gptj"])
@pytest.mark.parametrize("dtype", list(LIMITS))
def test_the_gpus_function_gives_the_same_bits(pairing: str, dtype: str) -> None:
    """The GPU's function gives the same bits as the CPU's code. Covers random alignments of rows and heads in the
    target, and rows that are zeroed, copied or rotated.
    """
    random = np.random.default_rng(5)
    for round_number in range(40):
        head_dim = int(random.integers(1, 40)) * 2
        rotary_dim = int(random.integers(1, head_dim // 2 + 1)) * 2
        heads, rows = int(random.integers(1, 5)), int(random.integers(1, 40))
        if round_number % 2:
            head_dim, rotary_dim = 64, 32
        rotation = KeyRotation(spec_of(pairing, head_dim, rotary_dim), heads, dtype)
        element, head_bytes = rotation.element_bytes, rotation.row_bytes // heads
        keys = encode(random.standard_normal((rows, heads, head_dim)), dtype)
        # The heads of a token are not adjacent, as in a cache of shape [heads, tokens, head_dim]. Tokens are in random
        # order.
        room = 2 * rows
        slots = random.permutation(room)[:rows].astype(np.int64)
        head_stride = room * head_bytes + element * int(random.integers(0, 3))
        target_places = RowPlaces(slots * head_bytes + element * int(random.integers(0, 2)), head_stride)
        old, new = random.integers(0, 300, rows), random.integers(0, 300, rows)
        new[::4] = old[::4]
        table = rotation.table(old, new, zero=random.random(rows) < 0.2)
        found = []
        for lane_by_lane in (False, True):
            target = np.full(heads * head_stride + 64, 0xA5, np.uint8)
            with rotated(lane_by_lane):
                rotation.apply(keys, dense(rotation, rows), target, target_places, table)
            found.append(target)
        np.testing.assert_array_equal(found[0], found[1])
        touched = np.zeros(len(found[0]), np.bool_)
        for offset in target_places.offsets:
            for head in range(heads):
                at = offset + head * head_stride
                touched[at : at + head_bytes] = True
        assert (found[0][~touched] == 0xA5).all()


@pytest.mark.parametrize("dtype", list(LIMITS))
def test_an_unchanged_position_changes_no_bit(dtype: str) -> None:
    rotation = KeyRotation(spec_of(), 2, dtype)
    keys = encode(np.random.default_rng(0).standard_normal((64, 2, 128)), dtype)
    keys.reshape(-1).view(np.uint8)[:256] = 0xFF  # all ones, which are NaNs
    at = positions(64, 9999, 3)
    for lane_by_lane in (False, True):
        np.testing.assert_array_equal(
            rotate(rotation, keys, at, at, lane_by_lane).view(np.uint8), keys.view(np.uint8)
        )


def test_two_rotations_equal_one() -> None:
    rotation = KeyRotation(spec_of(), 2, "float32")
    keys = np.random.default_rng(0).standard_normal((64, 2, 128)).astype(np.float32)
    a, b, c = (positions(64, 20_000, seed) for seed in (1, 2, 3))
    twice = rotate(rotation, rotate(rotation, keys, a, b), b, c)
    once = rotate(rotation, keys, a, c)
    assert relative_error(twice, once) <= 1e-6
    assert relative_error(rotate(rotation, keys, a, b), once) > 0.1


@pytest.mark.parametrize("rows", [7, 9_000])
@pytest.mark.parametrize("pairing", ["neox", "gptj"])
@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize(("rotary_dim", "lead"), [(64, 0), (48, 0), (20, 0), (64, 1), (64, 4)])
def test_in_place_and_streamed(rows: int, pairing: str, dtype: str, rotary_dim: int, lead: int) -> None:
    """A rotation gives the same bits in place, to another buffer, and past the CPU's caches. Large batches bypass the
    caches if the target's alignment allows it.
    """
    rotation = KeyRotation(spec_of(pairing, 64, rotary_dim), 4, dtype)
    keys = encode(np.random.default_rng(0).standard_normal((rows, 4, 64)), dtype)
    old, new = positions(rows, 500, 1), positions(rows, 500, 2)
    new[::5] = old[::5]
    table, places = rotation.table(old, new, zero=np.arange(rows) % 7 == 3), dense(rotation, rows)
    target = np.full(keys.size + 8, 7, keys.dtype)
    moved = RowPlaces(places.offsets + lead * rotation.element_bytes, places.head_stride)
    rotation.apply(keys, places, target, moved, table)
    assert (target[:lead] == 7).all()
    assert (target[lead + keys.size :] == 7).all()
    rotation.apply(keys, places, keys, places, table)
    np.testing.assert_array_equal(keys.reshape(-1), target[lead : lead + keys.size])


@pytest.mark.parametrize("pairing", ["neox", "gptj"])
@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize("rotary_dim", [64, 48])
def test_keys_that_are_no_ordinary_numbers(pairing: str, dtype: str, rotary_dim: int) -> None:
    """The CPU's code and the GPU's give the same bits for infinities, subnormal numbers and NaNs, and no NaN becomes a
    number.

    For heads of 32 pairs the CPU's code uses the processor's widest vectors; for heads of 24 pairs it uses AVX2.
    """
    rotation = KeyRotation(spec_of(pairing, 64, rotary_dim), 4, dtype)
    words = np.random.default_rng(0).integers(0, 256, (400, 4, 64, rotation.element_bytes), np.uint8)
    keys = words.view(np.uint32 if dtype == "float32" else np.uint16)[..., 0]
    keys[1::3] &= {"float32": 0x807FFFFF, "bfloat16": 0x807F, "float16": 0x83FF}[dtype]  # subnormal
    keys = keys.view({"float32": np.float32, "float16": np.float16}.get(dtype, np.uint16))
    # All bits of these NaNs are set. If they were rounded like numbers, a carry could turn them into numbers.
    keys.view(np.uint8)[::3, 0] = 0xFF
    old, new = positions(400, 500, 1), positions(400, 500, 2)
    with np.errstate(invalid="ignore", over="ignore"):
        found = [decode(rotate(rotation, keys, old, new, by_lane), dtype) for by_lane in (False, True)]
    assert np.isnan(found[0][::3, 0][new[::3] != old[::3]]).all()
    np.testing.assert_array_equal(found[0], found[1])


def test_float16_of_every_value() -> None:
    """A rotation by an angle of 0 leaves every finite float16 value unchanged, even if flexkv computes the rotation and
    does not just copy. Rounding is to nearest even.
    """
    rotation = KeyRotation(RopeSpec(2, 2, 10_000.0), 1, "float16", np.zeros(1))
    values = np.arange(65_536, dtype=np.uint16).view(np.float16)
    values = values[np.isfinite(values)]
    keys = np.stack([values, np.zeros_like(values)], axis=1).reshape(-1, 1, 2)
    rows = len(keys)
    found = rotate(rotation, keys, np.zeros(rows, np.int64), np.ones(rows, np.int64))
    np.testing.assert_array_equal(found[..., 0], keys[..., 0])
    turn = KeyRotation(RopeSpec(2, 2, 10_000.0), 1, "float16", np.array([0.3]))
    found = rotate(turn, keys, np.zeros(rows, np.int64), np.ones(rows, np.int64))
    wanted = (keys[:, 0, 0].astype(np.float32) * np.float32(np.cos(0.3))).astype(np.float16)
    np.testing.assert_array_equal(found[:, 0, 0], wanted)


def test_rows_places_and_tables_that_do_not_fit_are_refused() -> None:
    rotation = KeyRotation(spec_of(head_dim=8), 2, "float32")
    keys = np.zeros((4, 2, 8), np.float32)
    places, other = dense(rotation, 4), np.zeros((4, 2, 8), np.float32)
    copies = TurnTable.copies(4)
    rotation.apply(keys, places, other, places, copies)
    beyond = RowPlaces(places.offsets + 1 * rotation.element_bytes, places.head_stride)
    with pytest.raises(BlockRangeError, match="row 3"):
        rotation.apply(keys, places, other, beyond, copies)
    with pytest.raises(BlockRangeError, match="row 3"):
        rotation.apply(keys, beyond, other, places, copies)
    with pytest.raises(BlockRangeError, match="turn 0"):
        rotation.apply(keys, places, other, places, TurnTable(np.zeros(4, np.int32), copies.turns))
    moved = RowPlaces(places.offsets[::-1].copy(), places.head_stride)
    with pytest.raises(GeometryError, match="stay in its place"):
        rotation.apply(keys, places, keys, moved, copies)
    odd = RowPlaces(np.array([0, 64, 126, 190]), places.head_stride)
    with pytest.raises(GeometryError, match="starts at byte"):
        rotation.apply(keys, places, other, odd, copies)
    with pytest.raises(GeometryError, match="head stride"):
        rotation.apply(keys, places, other, RowPlaces(places.offsets, 8), copies)
    with pytest.raises(GeometryError, match="src_offsets"):
        rotation.apply(keys, places, other, places, TurnTable.copies(3))
    with pytest.raises(GeometryError, match="dtype"):
        KeyRotation(spec_of(head_dim=8), 2, "int8").apply(keys, places, other, places, copies)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_turn_that_is_no_number_is_refused(value: float) -> None:
    rotation = KeyRotation(spec_of(head_dim=8), 2, "float32")
    keys, places = np.ones((4, 2, 8), np.float32), dense(rotation, 4)
    table = rotation.table(np.arange(4), np.arange(4) + 3)
    before, turns = np.full_like(keys, 7), table.turns.copy()
    target = before.copy()
    turns[-1, 1, 2] = value
    with pytest.raises(GeometryError, match=rf"turn {len(turns) - 1} has a {value} among"):
        rotation.apply(keys, places, target, places, TurnTable(table.of_row, turns))
    np.testing.assert_array_equal(target, before)
    rotation.apply(keys, places, target, places, table)
    assert (target != before).any()
