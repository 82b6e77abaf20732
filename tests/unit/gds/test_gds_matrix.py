"""Tests transfers between raw files and a pool, for random geometries. Every byte of the files and the pool is
compared, including the bytes that must not change.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flexkv import c_ext
from flexkv.errors import TransferError
from tests.soak import soak_factor
from tests.unit.gds.raw_world import SGLANG, TRTLLM, VLLM, Case, World

CASES = 150 * soak_factor()
ELEMENT_BYTES = (1, 2, 4, 8)
"""Element sizes of float8, bfloat16, float32 and 64-bit types."""
ELEMENTS = (1, 2, 7, 16, 48, 250, 512, 1000, 1024, 4096, 4100, 6144, 9216)
"""Numbers of elements in a run, for cases with fewer than 80 layers. Cases with 80 layers use DEEP_ELEMENTS."""
DEEP_ELEMENTS = (3, 64, 1024, 4096)
DEEP = 80
NO_URING = c_ext.uring_refusal()


def sampled(seed: int) -> Case:
    """Returns a random geometry that depends only on the seed. About half of the geometries are aligned for direct
    I/O."""
    random = np.random.default_rng(seed)

    def one_of(*values: int) -> int:
        return int(random.choice(values))

    layers = one_of(1, 1, 2, 3, 5, 16, DEEP, DEEP)
    element_bytes = one_of(*ELEMENT_BYTES)
    chunk = one_of(*(ELEMENTS if layers < DEEP else DEEP_ELEMENTS)) * element_bytes
    lo = int(random.integers(0, layers))
    hi = int(random.integers(lo + 1, layers + 1))
    whole = bool(random.integers(0, 2))
    ranks = one_of(1, 1, 2, 4)
    blocks = one_of(2, 9, 24)
    return Case(
        backend=one_of(VLLM, TRTLLM, SGLANG),
        kv=one_of(1, 2),
        chunk=chunk,
        element_bytes=element_bytes,
        layers=layers,
        blocks=blocks,
        moved=int(random.integers(1, blocks + 1)),
        read=bool(random.integers(0, 2)),
        staged=bool(random.integers(0, 4)),
        seed=seed,
        lo=0 if whole else lo,
        hi=None if whole else hi,
        slots=one_of(1, 2, 5, 64),
        devices=one_of(1, 2, 3),
        files=one_of(1, 2),
        round_robin=one_of(1, 1, 3),
        kv_outermost=bool(random.integers(0, 2)),
        ranks=ranks,
        rank=int(random.integers(0, ranks)),
        gap=one_of(0, 0, 16, 5),
        align=one_of(1, 4096),
        io="threads" if random.integers(0, 2) or NO_URING else "uring",
    )


def move(world: World, manager: c_ext.GDSManager) -> None:
    function = c_ext.transfer_kv_blocks_gds_staged if world.case.staged else c_ext.transfer_kv_blocks_gds
    function(manager, *world.arguments(), **world.options())  # type: ignore[arg-type]


def levels(case: Case) -> dict[str, object]:
    """Returns the case's level on each axis of the matrix."""
    return {
        "backend": case.backend,
        "kv": case.kv,
        "element bytes": case.element_bytes,
        "run": "4 KiB" if case.chunk % 4096 == 0 else "16 B" if case.chunk % 16 == 0 else "odd",
        "layers": case.layers if case.layers in (1, DEEP) else "some",
        "layer range": "part" if len(case.layer_list) < case.layers else "all",
        "direction": "read" if case.read else "write",
        "staged": case.staged,
        "slots": "fewer than blocks" if case.slots < case.moved else "enough",
        "disks": "several" if case.devices > 1 else "one",
        "ranks": "several" if case.ranks > 1 else "one",
        "files": case.align,
        "io": case.io,
    }


IMPOSSIBLE = {frozenset({("layers", 1), ("layer range", "part")})}
"""Pairs of levels that no case can have."""


def missing_pairs(cases: list[Case]) -> set[frozenset[tuple[str, object]]]:
    """Returns the pairs of levels, on two different axes, that no case covers."""
    seen = [levels(case) for case in cases]
    of_axis = {axis: {level[axis] for level in seen} for axis in seen[0]}
    wanted = {
        frozenset({(one, a), (other, b)})
        for one, other in itertools.combinations(of_axis, 2)
        for a, b in itertools.product(of_axis[one], of_axis[other])
    }
    had = {frozenset(pair) for level in seen for pair in itertools.combinations(level.items(), 2)}
    return wanted - had - IMPOSSIBLE


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(CASES))
def test_every_byte_arrives_and_no_other_changes(seed: int, tmp_path: Path) -> None:
    world = World(sampled(seed), tmp_path)
    manager = world.manager()
    world.expect()
    move(world, manager)
    assert world.differences() == [], world.case
    totals = manager.totals
    assert totals["failed_pages"] == 0
    assert totals["pages"] == world.case.moved
    manager.close()


def test_the_samples_cover_what_they_should() -> None:
    cases = [sampled(seed) for seed in range(CASES)]
    assert {(c.backend, c.kv, c.read, c.staged) for c in cases} == {
        (b, k, r, s) for b in (0, 1, 2) for k in (1, 2) for r in (False, True) for s in (False, True)
    }
    assert {c.layers for c in cases} >= {1, DEEP}
    assert {c.element_bytes for c in cases} == set(ELEMENT_BYTES)
    assert missing_pairs(cases) == set()
    # The control: without the cases that write 80 layers, the pair of 80 layers and writing is reported as missing.
    lame = [case for case in cases if case.layers < DEEP or case.read]
    assert frozenset({("layers", DEEP), ("direction", "write")}) in missing_pairs(lame)
    assert any(c.slots < c.moved and c.staged for c in cases)
    assert any(c.hi is not None and c.lo > 0 for c in cases)


@pytest.mark.parametrize("where", ["pool", "file"])
def test_a_dropped_tail_would_be_seen(where: str, tmp_path: Path) -> None:
    """The control: if the transfer moves one byte less of each run, the comparison fails."""
    case = replace(sampled(0), read=where == "pool", chunk=250, layers=3, lo=0, hi=None, staged=True)
    world = World(case, tmp_path)
    manager = world.manager()
    world.expect()
    arguments = list(world.arguments())
    arguments[10] = case.chunk - 1
    c_ext.transfer_kv_blocks_gds_staged(manager, *arguments, **world.options())  # type: ignore[arg-type]
    assert world.differences()
    manager.close()


def test_staging_cuts_the_calls(tmp_path: Path) -> None:
    """With 80 layers of K and V in a layer-first pool, staging needs one I/O call per block instead of 80 (vLLM) or 160
    (SGLang)."""
    for backend, factor in ((VLLM, 80), (SGLANG, 160)):
        calls = []
        for staged in (True, False):
            folder = tmp_path / f"{backend}-{staged}"
            folder.mkdir()
            case = Case(backend, 2, 4096, 80, 6, 6, True, staged, 1, align=4096, slots=4)
            world = World(case, folder)
            manager = world.manager()
            world.expect()
            move(world, manager)
            assert world.differences() == []
            calls.append(manager.totals["io_calls"])
            assert manager.totals["bounced_calls"] == 0
            manager.close()
        assert calls == [6, 6 * factor]


def test_a_pool_of_one_piece_needs_no_staging(tmp_path: Path) -> None:
    case = Case(TRTLLM, 2, 4096, 8, 6, 6, True, True, 1, align=4096)
    world = World(case, tmp_path)
    manager = world.manager()
    world.expect()
    move(world, manager)
    assert world.differences() == []
    assert manager.totals["io_calls"] == 6
    assert manager.totals["launches"] == 0
    assert manager.staging_bytes == 0
    manager.close()


def test_a_short_file_fails_its_blocks_by_name(tmp_path: Path) -> None:
    case = Case(VLLM, 2, 4096, 4, 8, 8, True, True, 1, align=4096)
    world = World(case, tmp_path)
    path = Path(world.paths[0][0])
    cut = case.file_block_stride * 5
    path.write_bytes(path.read_bytes()[: cut + 512])
    manager = world.manager()
    with pytest.raises(TransferError, match=r"3 of 8 blocks were not read.*short") as caught:
        move(world, manager)
    for gpu, ssd in zip(world.gpu.tolist(), world.ssd.tolist(), strict=True):
        named = f"block {gpu} (block {ssd} of the files)" in str(caught.value)
        assert named == (ssd >= 5)
        wrong = any(
            (world.pool.run(layer, kv, gpu) != world.file_run(layer, kv, ssd)).any()
            for layer in range(4)
            for kv in range(2)
        )
        assert wrong == named
    manager.close()
