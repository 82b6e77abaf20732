"""`flexkv bench transfer` reports how much copies slow down other work. Every figure comes from work during which
copies were in flight, and the sums are right.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flexkv import c_ext
from flexkv.cli.bench import beside_rows as beside_module
from flexkv.cli.bench.beside_rows import COPY_KINDS, PAIRS, RUN_BYTES, BesideRow, beside_rows, pair_factors
from flexkv.cli.bench.engine_work import LAUNCH, WORKS
from flexkv.cli.bench.latency_rows import latency_rows
from flexkv.cli.bench.op_stream import OUTSTANDING, OpStream
from flexkv.config import TransferConfig
from flexkv.errors import ContractError
from flexkv.transfer.graph import OpId, OpKind, OpResult, OpStatus, TransferGraph

LONG_S = 60.0
PAGE = 1000
BOTH = [OpKind.H2D, OpKind.D2H]


class Lanes:
    """Replaces a transfer engine. An op is finished when the test calls `end` for it, or waits for it."""

    device = None

    def __init__(self) -> None:
        self.open: list[Any] = []
        self.results: list[OpResult] = []
        self.full = False

    def submit(self, graph: TransferGraph, stream: object = None) -> int | None:
        if self.full:
            return None
        (op,) = graph.ops
        self.open.append(op)
        return int(op.op_id)

    def end(self, kind: OpKind, status: OpStatus = OpStatus.OK) -> None:
        op = next(op for op in self.open if op.kind is kind)
        self.open.remove(op)
        failed = np.empty(0, np.int32) if status is OpStatus.OK else np.arange(op.pages, dtype=np.int32)
        self.results.append(OpResult(OpId(op.op_id), status, failed, "torn" if status else ""))

    def poll(self) -> list[OpResult]:
        results, self.results = self.results, []
        return results

    def wait(self, ticket: int, deadline_s: float) -> bool:
        for op in list(self.open):
            if int(op.op_id) == ticket:
                self.end(op.kind)
        return True


def stream_of(lanes: Lanes, kinds: list[OpKind], **options: Any) -> OpStream:
    return OpStream(lanes, kinds, 24, PAGE, **options)  # type: ignore[arg-type]


def test_each_direction_keeps_its_ops_outstanding_and_none_share_a_block() -> None:
    lanes = Lanes()
    stream = stream_of(lanes, BOTH)
    for _ in range(3):
        stream.keep()
        for kind in BOTH:
            assert sum(op.kind is kind for op in lanes.open) == OUTSTANDING
        blocks = np.concatenate([op.blocks for op in lanes.open])
        assert len(blocks) == len(set(blocks)) == 24
        lanes.end(OpKind.H2D)
    assert stream.ended_ops == 0, "no store has ended"


def test_bytes_are_those_of_ops_that_have_ended() -> None:
    lanes = Lanes()
    stream = stream_of(lanes, [OpKind.D2H])
    stream.keep()
    begin_s = time.perf_counter()
    lanes.end(OpKind.D2H)
    stream.keep()
    end_s = time.perf_counter()
    rate = stream.gbps(OpKind.D2H, begin_s - 10.0, end_s + 10.0)
    assert rate == pytest.approx(8 * PAGE / (end_s - begin_s + 20.0) / 1e9)
    assert stream.gbps(OpKind.H2D, begin_s, end_s) is None
    assert stream.gbps(OpKind.D2H, end_s + 1.0, end_s + 2.0) == 0.0
    stream.drain()
    assert lanes.open == []


@pytest.mark.parametrize("status", [OpStatus.FAILED, OpStatus.CANCELLED])
def test_a_failed_copy_is_no_figure(status: OpStatus) -> None:
    lanes = Lanes()
    stream = stream_of(lanes, [OpKind.H2D])
    stream.keep()
    lanes.end(OpKind.H2D, status)
    with pytest.raises(ContractError, match="a copy failed: torn"):
        stream.keep()


def test_a_full_queue_is_named() -> None:
    lanes = Lanes()
    lanes.full = True
    with pytest.raises(ContractError, match="queue full"):
        stream_of(lanes, [OpKind.H2D]).keep()


@pytest.mark.parametrize("layerwise", [True, False])
def test_only_loads_are_moved_by_layer(layerwise: bool) -> None:
    lanes = Lanes()
    stream_of(lanes, BOTH, layerwise=layerwise).keep()
    assert {(op.kind, op.layerwise) for op in lanes.open} == {(OpKind.H2D, layerwise), (OpKind.D2H, False)}


def test_a_factor_is_of_its_own_pair() -> None:
    alone = [np.array([1.0, 1.0, 9.0]), np.array([2.0])]
    assert pair_factors(alone, [np.array([1.1, 1.1, 1.1]), np.array([5.0])]) == pytest.approx([1.1, 2.5])


@pytest.fixture(scope="module")
def rows() -> list[BesideRow]:
    if c_ext.cuda_info()["device_count"]:
        pytest.skip("there is a GPU")
    pytest.importorskip("torch")
    return [row for found in beside_rows(None, 32 << 20, TransferConfig(), 2.0) for row in found]


def test_every_work_has_a_row_beside_every_kind_of_copies(rows: list[BesideRow]) -> None:
    found = {(row.work, row.direction, row.layerwise, row.run_bytes) for row in rows}
    # The pool has four blocks of 8 MiB.
    wanted = {
        (work, kind.direction, kind.layerwise, run)
        for work in (*WORKS, LAUNCH)
        for kind in COPY_KINDS
        for run in RUN_BYTES
    }
    assert found == wanted
    assert len(rows) == len(wanted)


def test_a_row_gives_the_median_of_its_pairs_and_their_spread(rows: list[BesideRow]) -> None:
    for row in rows:
        assert row.pairs == PAIRS
        assert row.factor is not None
        assert row.factor_least is not None
        assert row.factor_most is not None
        assert row.factor_least <= row.factor <= row.factor_most
        assert row.alone_p50_ms is not None
        assert row.alone_p99_ms is not None
        assert 0 < row.alone_p50_ms <= row.alone_p99_ms
        assert "plain memory" in row.note


def test_a_row_names_rates_of_its_own_directions(rows: list[BesideRow]) -> None:
    for row in rows:
        assert (row.load_gbps is not None) is (row.direction in ("H2D", "both"))
        assert (row.store_gbps is not None) is (row.direction in ("D2H", "both"))
    # A row has no rate if its window was shorter than one op. Not all windows are that short.
    assert any(row.load_gbps for row in rows)
    assert any(row.store_gbps for row in rows)


def test_without_torch_every_row_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_module, "make_engine_work", lambda device: "torch is not installed")
    (found,) = beside_rows(None, 1 << 20, TransferConfig(), 1.0)
    assert len(found) == len(COPY_KINDS) * (len(WORKS) + 1)
    assert {row.note for row in found} == {"not measured: torch is not installed"}
    assert all(row.factor is None and row.load_gbps is None for row in found)


def test_copies_that_never_end_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_module, "DRAIN_S", 0.05)
    lanes = Lanes()
    with pytest.raises(ContractError, match="no copy ended"):
        beside_module._measure_beside(stream_of(lanes, [OpKind.H2D]), SimpleNamespace(), 1.0)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def latencies() -> tuple[list[Any], list[Any]]:
    if c_ext.cuda_info()["device_count"]:
        pytest.skip("there is a GPU")
    found = list(latency_rows(None, 32 << 20, TransferConfig()))
    return [row for rows, _ in found for row in rows], [row for _, rows in found for row in rows]


def test_loads_and_stores_of_every_size_that_fits_have_a_row(latencies: tuple[list[Any], list[Any]]) -> None:
    rows, _ = latencies
    found = {(row.what, row.run_bytes, row.blocks) for row in rows}
    # 32 MiB are 1,024 blocks of 8 layers with runs of 4 KiB, or 128 blocks with runs of 32 KiB.
    sizes = [(4096, blocks) for blocks in (1, 16, 256, 1024)] + [(32 << 10, blocks) for blocks in (1, 16)]
    assert found == {(what, *size) for what in ("load by layer", "store") for size in sizes}
    for row in rows:
        assert 0 < row.submit_us <= row.p50_us <= row.p99_us
        assert row.gbps == pytest.approx(row.run_bytes * 8 * row.blocks / row.p50_us / 1e3)
        if row.what == "store":
            assert row.first_layer_us is None
        else:
            assert 0 < row.first_layer_us <= row.p99_us


def test_the_cpus_time_is_of_a_full_link_and_of_an_idle_one(latencies: tuple[list[Any], list[Any]]) -> None:
    _, used = latencies
    assert [(row.what, row.run_bytes) for row in used] == [
        (what, run) for run in (4096, 32 << 10) for what in ("loads", "stores", "idle")
    ]
    for row in used:
        assert (row.gbps > 0) is (row.what != "idle")
        # In plain memory the CPU makes the copies, so every kind of copy uses the CPU's cores.
        assert row.cores > 0 or row.what == "idle"
