"""`flexkv bench transfer --save` writes a table that says for which run lengths a copy kernel or the copy engine is
better, and `flexkv info` shows the table. The rates are made up, because these tests run without a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from flexkv import c_ext
from flexkv.cli import bench_command, info_facts
from flexkv.cli.bench.transfer_bench import RUN_BYTES, TransferBench
from flexkv.cli.bench.way_rows import BY_ENGINE, BY_KERNEL, WayRow, chosen_ways, way_rows
from flexkv.cli.bench_command import command
from flexkv.cli.info_command import copy_ways_words
from flexkv.config import load_config
from flexkv.transfer.ways_file import ALL_RUNS, CopyWays, WaysKey, read_ways, write_ways

KEY = WaysKey("GPU-1", 16, 5, "13.0", "0.1.0")


class MadeUp:
    """Replaces the measurement of a GPU. The copy kernel copies 40 GB/s at every run length. The copy engine is faster
    with longer runs, up to 50 GB/s.
    """

    def __init__(self, ways: CopyWays) -> None:
        self.ways = ways

    def one_way_gbps(self, run_bytes: int) -> dict[str, float] | None:
        if run_bytes > 1 << 20:
            return None
        engine = min(50.0, 50.0 * run_bytes / (64 << 10))
        rate = {BY_KERNEL: 40.0, BY_ENGINE: engine}[self.ways]
        return {"H2D": rate, "D2H": rate}


def test_the_copy_engine_has_the_lengths_from_which_on_it_is_the_better_way() -> None:
    rows = way_rows(MadeUp)
    assert len(rows) == 2 * len([run for run in RUN_BYTES if run <= 1 << 20])
    # Stores use the kernel for all run lengths, because its rate is at least 0.8 of the copy engine's.
    assert chosen_ways(rows) == CopyWays(64 << 10, ALL_RUNS)


@pytest.mark.parametrize(
    ("kernel", "engine", "below"),
    [
        ((40, 40, 40), (10, 20, 30), (ALL_RUNS, ALL_RUNS)),
        ((40, 40, 40), (39, 39, 39), (0, ALL_RUNS)),
        # The copy engine is worse at 8192, so it does not get 4096 either.
        ((40, 40, 40), (39, 10, 39), (16384, ALL_RUNS)),
        ((10, 10, 10), (50, 50, 50), (0, 0)),
        ((40, 20, 10), (50, 50, 50), (0, 8192)),
    ],
)
def test_rates_decide(kernel: tuple[int, ...], engine: tuple[int, ...], below: tuple[int, int]) -> None:
    rows = [
        WayRow(4096 << i, way, k, e)
        for i, (k, e) in enumerate(zip(kernel, engine, strict=True))
        for way in ("D2H", "H2D")
    ]
    assert chosen_ways(rows) == CopyWays(*below)


def test_a_table_is_saved_and_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ways.json"
    lane = SimpleNamespace(notes="", ways={"h2d": "kernel for all runs"})
    engine = SimpleNamespace(cuda_lane=lane, close=lambda _: None)
    monkeypatch.setattr(bench_command, "engine_of", lambda *_, **__: engine)
    monkeypatch.setattr(bench_command, "this_key", lambda _: KEY)
    monkeypatch.setattr(bench_command, "TransferBench", lambda *arguments: MadeUp(arguments[-1]))
    done = CliRunner().invoke(command, ["transfer", "--device", "0", "--save", str(path)])
    assert done.exit_code == 0, (done.output, done.exception)
    assert str(KEY) in " ".join(done.output.split())
    assert read_ways(str(path), KEY) == CopyWays(64 << 10, ALL_RUNS)
    measured = json.loads(path.read_text())["measured"]
    assert measured[0] == {"run_bytes": 4096, "direction": "H2D", "kernel_gbps": 40.0, "engine_gbps": 3.125}
    lane.notes, lane.ways = "no copy kernel: built without CUDA", {"h2d": "in batches"}
    path.unlink()
    done = CliRunner().invoke(command, ["transfer", "--device", "0", "--save", str(path)])
    assert done.exit_code == 2
    assert "built without CUDA" in done.output
    assert not path.exists()


def test_without_a_gpu_or_the_kernel_nothing_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ways.json"
    monkeypatch.setattr(c_ext, "cuda_info", lambda: {"device_count": 0, "reason": "no driver"})
    done = CliRunner().invoke(command, ["transfer", "--save", str(path)])
    assert done.exit_code == 2
    assert "--save measures a GPU's ways" in done.output
    monkeypatch.setenv("FLEXKV_TRANSFER_COPY_KERNEL", "false")
    done = CliRunner().invoke(command, ["transfer", "--device", "0", "--save", str(path)])
    assert done.exit_code == 2
    assert "transfer.copy_kernel" in done.output
    done = CliRunner().invoke(command, ["transfer", "--save", str(tmp_path / "none" / "ways")])
    assert done.exit_code == 2
    assert "does not exist" in " ".join(done.output.split())
    assert list(tmp_path.iterdir()) == []


def test_rates_of_one_way_are_measured_by_lanes() -> None:
    bench = TransferBench(None, 1 << 20, 1, load_config(None, {}).transfer)
    found = bench.one_way_gbps(4096)
    assert found is not None
    assert found.keys() == {"H2D", "D2H"}
    assert min(found.values()) > 0
    assert bench.one_way_gbps(4 << 20) is None


def test_info_says_which_table_is_in_force_and_where_it_is_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ways.json"
    write_ways(path, KEY, CopyWays(16 << 10, ALL_RUNS), [])
    settings = load_config(None, {"FLEXKV_TRANSFER_WAYS_FILE": str(path)}).transfer
    keys = [KEY, WaysKey("GPU-2", 8, 4, "13.0", "0.1.0")]
    monkeypatch.setattr("flexkv.transfer.ways_file.this_key", lambda device: keys[device])

    def facts(devices: int, of: Any = settings) -> dict[str, Any]:
        monkeypatch.setattr(c_ext, "cuda_info", lambda: {"device_count": devices})
        return info_facts.copy_ways_facts(of)

    found = facts(2)
    assert found["file"] == str(path)
    first, second = found["tables"]
    assert first == {
        "gpu": 0,
        "from": str(path),
        "refused": "",
        "kernel_below_bytes": {"h2d": 16384, "d2h": "all"},
    }
    assert all(str(key) in second["refused"] for key in keys)
    assert second["kernel_below_bytes"] is None
    assert copy_ways_words(found) == (
        f"gpu 0: {path}, kernel for loads of runs below 16.0 KiB and all stores; gpu 1: none, {path} is refused"
    )
    built_in = facts(1, load_config(None, {}).transfer)
    assert built_in["tables"][0]["kernel_below_bytes"] is None
    assert copy_ways_words(built_in) == "gpu 0: built in"
    assert copy_ways_words(facts(0)) == f"no GPU; {path} for one"
    assert copy_ways_words(facts(0, load_config(None, {}).transfer)) == "no GPU; built in for one"
