"""Tests the rotation kernel on a GPU: its results have the same bits as the CPU's in every geometry, and it runs in the
order of its stream. One test prints its bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flexkv.blend.rope import RopeSpec
from flexkv.blend.rotation import ZERO_ROW, KeyRotation, RowPlaces, TurnTable
from flexkv.errors import GeometryError
from tests.gpu.needs import CUDA_BUILD
from tests.unit.blend.rope_reference import decode, encode, relative_error, turned

pytestmark = CUDA_BUILD

LIMITS = {"float32": 1e-6, "bfloat16": 2.6e-3, "float16": 3.3e-4}
PAIRING = pytest.mark.parametrize("pairing", ["neox", "gptj"])
DTYPE = pytest.mark.parametrize("dtype", list(LIMITS))
BUFFER_BYTES = 256 << 20


@pytest.fixture
def device(torch: Any) -> Any:
    from flexkv.adapters.torch_tensors.device import TorchDevice

    return TorchDevice("cuda")


def rotation_of(pairing: str, dtype: str, heads: int, head_dim: int, rotary_dim: int) -> KeyRotation:
    spec = RopeSpec(head_dim, rotary_dim, 10_000.0, pairing=pairing)  # type: ignore[arg-type]
    return KeyRotation(spec, heads, dtype)


def upload(torch: Any, array: NDArray[Any]) -> Any:
    """Copies the array's bytes to the GPU."""
    return torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy()).cuda()


def apply(
    rotation: KeyRotation,
    device: Any,
    keys: Any,
    places: RowPlaces,
    target: Any,
    target_places: RowPlaces,
    table: TurnTable,
) -> None:
    """Rotates as flexkv does: checks the tables, copies them to the device, and passes the copies to the kernel."""
    rotation.check(keys, places, target, target_places, table)
    stream = device.current_stream()
    rotation.apply(keys, places.on(device), target, target_places.on(device), table.on(device), stream=stream)


@PAIRING
@DTYPE
def test_the_cpus_bits_in_every_geometry(torch: Any, device: Any, pairing: str, dtype: str) -> None:
    """Random cases with any alignment, rows and heads at any offset, and rows that are zeroed, copied or rotated. Bytes
    outside of these rows do not change.
    """
    random = np.random.default_rng(5)
    for round_number in range(60):
        head_dim = int(random.integers(1, 80)) * 2
        rotary_dim = int(random.integers(1, head_dim // 2 + 1)) * 2
        heads, rows = int(random.integers(1, 9)), int(random.integers(1, 400))
        if round_number % 2:
            head_dim, rotary_dim = 128, int(random.choice([32, 64, 128]))
        rotation = rotation_of(pairing, dtype, heads, head_dim, rotary_dim)
        element, head_bytes = rotation.element_bytes, rotation.row_bytes // heads
        keys = encode(random.standard_normal((rows, heads, head_dim)), dtype)
        in_order = RowPlaces(np.arange(rows, dtype=np.int64) * rotation.row_bytes, head_bytes)
        room = 2 * rows
        slots = random.permutation(room)[:rows].astype(np.int64)
        head_stride = room * head_bytes + element * int(random.integers(0, 3))
        shift = element * int(random.integers(0, 2))
        target_places = RowPlaces(slots * head_bytes + shift, head_stride)
        old, new = random.integers(0, 3000, rows), random.integers(0, 3000, rows)
        new[::4] = old[::4]
        table = rotation.table(old, new, zero=random.random(rows) < 0.2)
        wanted = np.full(heads * head_stride + 64, 0xA5, np.uint8)
        rotation.apply(keys, in_order, wanted, target_places, table)
        target = torch.full((len(wanted),), 0xA5, dtype=torch.uint8, device="cuda")
        apply(rotation, device, upload(torch, keys), in_order, target, target_places, table)
        np.testing.assert_array_equal(target.cpu().numpy(), wanted)


@PAIRING
@DTYPE
def test_error_against_float64_in_place(torch: Any, device: Any, pairing: str, dtype: str) -> None:
    rotation = rotation_of(pairing, dtype, 4, 128, 64)
    random = np.random.default_rng(0)
    old, new = random.integers(0, 30_000, 500), random.integers(0, 30_000, 500)
    plain = random.standard_normal((500, 4, 128))
    before = turned(plain, rotation.spec, old, rotation.frequencies)
    keys = upload(torch, encode(before, dtype))
    places = RowPlaces(np.arange(500, dtype=np.int64) * rotation.row_bytes, rotation.row_bytes // 4)
    apply(rotation, device, keys, places, keys, places, rotation.table(old, new))
    shaped = keys.cpu().numpy().view(encode(before, dtype).dtype).reshape(before.shape)
    found = decode(shaped, dtype)
    assert relative_error(found, turned(plain, rotation.spec, new, rotation.frequencies)) <= LIMITS[dtype]
    # Control: before the rotation, the keys differ from the expected ones.
    assert relative_error(before, turned(plain, rotation.spec, new, rotation.frequencies)) > 0.1


@pytest.mark.parametrize("same_stream", [True, False], ids=["its stream", "control"])
def test_it_comes_after_what_its_stream_was_given(torch: Any, device: Any, same_stream: bool) -> None:
    """The rotation follows a slow copy in the same stream, and reads the keys that the copy writes. In the control the
    rotation is in another stream and reads the old bytes.
    """
    rotation = rotation_of("neox", "float32", 8, 128, 128)
    rows = 4096
    places = RowPlaces(np.arange(rows, dtype=np.int64) * rotation.row_bytes, rotation.row_bytes // 8)
    fresh = torch.randn(rows, 8, 128, device="cuda")
    keys, target = torch.zeros_like(fresh), torch.zeros_like(fresh)
    table = rotation.table(np.arange(rows), np.arange(rows) + 77)
    rotation.check(keys, places, target, places, table)
    tables = places.on(device), places.on(device), table.on(device)
    writer, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(writer):
        torch.cuda._sleep(100_000_000)
        keys.copy_(fresh)
    with torch.cuda.stream(writer if same_stream else other):
        rotation.apply(keys, tables[0], target, tables[1], tables[2], stream=device.current_stream())
    torch.cuda.synchronize()
    wanted = np.zeros((rows, 8, 128), np.float32)
    rotation.apply(fresh.cpu().numpy(), places, wanted, places, table)
    assert np.array_equal(target.cpu().numpy(), wanted) is same_stream


@pytest.mark.parametrize("seed", range(40))
def test_loads_whose_keys_are_turned_as_they_are_scattered(torch: Any, seed: int) -> None:
    from tests.unit.adapters.torch_layers import check_turned_load

    check_turned_load(seed, "cuda")


def test_rows_places_and_tables_that_do_not_fit_are_refused(torch: Any, device: Any) -> None:
    rotation = rotation_of("neox", "float32", 2, 64, 64)
    places = RowPlaces(np.arange(4, dtype=np.int64) * rotation.row_bytes, rotation.row_bytes // 2)
    table = rotation.table(np.arange(4), np.arange(4) + 3)
    keys = torch.zeros(4, 2, 64, device="cuda")
    with pytest.raises(GeometryError, match="both be in host memory or both on the GPU"):
        rotation.apply(keys, places, torch.zeros(4, 2, 64), places, table)
    with pytest.raises(GeometryError, match="both be in host memory or both on the GPU"):
        rotation.apply(keys, places, keys, places, table)
    with pytest.raises(GeometryError, match="tables are checked in host memory"):
        rotation.check(keys, places.on(device), keys, places, table)
    zeros = TurnTable(np.full(4, ZERO_ROW, np.int32), table.turns)
    ones = torch.ones_like(keys)
    apply(rotation, device, keys, places, ones, places, zeros)
    assert not ones.any()


@DTYPE
def test_bandwidth(
    torch: Any, device: Any, dtype: str, record_property: Callable[[str, object], None]
) -> None:
    """Prints the bandwidth of the kernel and of a copy of the same bytes. Does not check the times."""
    rotation = rotation_of("neox", dtype, 8, 128, 128)
    rows = BUFFER_BYTES // rotation.row_bytes
    places = RowPlaces(np.arange(rows, dtype=np.int64) * rotation.row_bytes, rotation.row_bytes // 8)
    slots = np.random.default_rng(0).permutation(rows).astype(np.int64) * rotation.row_bytes
    scattered = RowPlaces(slots, rotation.row_bytes // 8)
    keys = torch.zeros(rows * rotation.row_bytes, dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(keys)
    table = rotation.table(np.arange(rows), np.arange(rows) + np.repeat(np.arange(1, 9), rows // 8))
    rotation.check(keys, places, target, scattered, table)
    at, to, tables = places.on(device), scattered.on(device), table.on(device)
    stream = device.current_stream()

    def gb_per_s(work: Callable[[], object]) -> float:
        work()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(20):
            work()
        end.record()
        torch.cuda.synchronize()
        return 20 * 2 * BUFFER_BYTES / (begin.elapsed_time(end) / 1e3) / 1e9

    copy = gb_per_s(lambda: target.copy_(keys))
    fused = gb_per_s(lambda: rotation.apply(keys, at, target, to, tables, stream=stream))
    record_property("copy_gb_per_s", copy)
    record_property("fused_gb_per_s", fused)
    print(f"{dtype}: turned and scattered at {fused:.0f} GB/s, copied at {copy:.0f} GB/s (read and written)")
