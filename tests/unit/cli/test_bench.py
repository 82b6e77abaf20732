"""Tests `flexkv bench transfer` without a GPU, with an engine's pool in plain memory."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from flexkv import c_ext
from flexkv.cli import bench_command
from flexkv.cli.bench.disk_rows import disk_rows, path_of_totals
from flexkv.cli.bench.result_file import ResultFile
from flexkv.cli.bench.transfer_bench import TransferBench
from flexkv.cli.bench_command import command
from flexkv.config import TransferConfig
from flexkv.errors import ConfigError


@pytest.mark.skipif(c_ext.cuda_info()["device_count"] > 0, reason="measures the GPU instead")
def test_without_a_gpu_the_host_lanes_are_measured_and_said_to_be(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    arguments = [
        "transfer",
        "--megabytes",
        "32",
        "--repeats",
        "1",
        "--json",
        str(out),
        "--folder",
        str(tmp_path),
        "--seconds",
        "2",
    ]
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 0, (done.output, done.exception)
    assert "say nothing of a GPU" in done.output
    assert [line for line in done.output.splitlines() if line.endswith(" ...")] == [
        "copying ...",
        "timing single loads and stores ...",
        "copying beside an engine's work ...",
        "comparing ...",
        "reading from disk ...",
    ]
    assert "H2D: from host memory to the pool" in done.output
    assert "most_batch_copies" not in done.output, "a threshold of GPUs, of which there is none"
    content = json.loads(out.read_text())
    assert content["device"] is None
    rows = content["rows"]
    assert {row["path"] for row in rows} == {"cpu"}
    assert {row["direction"] for row in rows} == {"H2D", "D2H", "both"}
    # Every relevant run length has a row. The rate of copies in both directions at the same time is compared with the
    # rate of one direction.
    assert {32 << 10, 256 << 10, 1 << 20, 2 << 20} <= {row["run_bytes"] for row in rows}
    one_way: dict[int, list[float]] = {row["run_bytes"]: [] for row in rows}
    for row in rows:
        if row["direction"] == "both":
            assert row["share_of_one_way"] == pytest.approx(row["gbps"] / max(one_way[row["run_bytes"]]))
        else:
            assert row["share_of_one_way"] is None
            one_way[row["run_bytes"]].append(row["gbps"])
    assert any(row["direction"] == "both" and row["run_bytes"] == 2 << 20 for row in rows)
    assert all(row["gbps"] > 0 for row in rows)
    compared = content["comparisons"]
    assert {row["what"] for row in compared} == {
        "torch index_select + copy",
        "4 KiB copy, p99",
        "layout transform",
        "disk to pool, staged",
        "disk to pool, a call a run",
        "disk to pool, block-first",
        "disk to host page to pool",
        "bare reads of 2 MiB",
        "load, by CUDA events",
    }
    # With 80 layers of K and V, a page has 160 runs. With staging, a page needs one I/O call. Without staging, each run
    # and the trailer need one.
    pages = {row["run_bytes"]: row["calls"] for row in compared if row["what"] == "disk to host page to pool"}
    for row in compared:
        if row["what"] == "disk to pool, staged":
            assert row["calls"] == pages[row["run_bytes"]] > 0
        if row["what"] == "disk to pool, a call a run":
            assert row["calls"] == 161 * pages[row["run_bytes"]]
    assert list(tmp_path.iterdir()) == [out]
    assert all(row["path"] or row["note"] == "not measured: no GPU" for row in compared)
    assert all(row["multiprocessors"] == 0 for row in compared)
    # Each row names the path that was measured. It is a direct path only if the folder's disk has direct I/O, which the
    # rows of bare reads show.
    straight = not any("page cache" in row["note"] for row in compared if row["what"].startswith("bare"))
    paths = {row["what"]: row["path"] for row in compared if row["what"].startswith("disk to pool")}
    assert paths == {
        "disk to pool, staged": "staged",
        "disk to pool, a call a run": "direct" if straight else "staged",
        "disk to pool, block-first": "direct" if straight else "staged",
    }
    assert {row["path"] for row in compared if row["what"] == "disk to host page to pool"} <= {
        "io_uring, then cpu",
        "threads, then cpu",
    }
    bare = {row["gbps"] for row in compared if row["what"] == "bare reads of 2 MiB"}
    for row in compared:
        if row["what"].startswith("disk to "):
            assert any(row["share"] == pytest.approx(row["gbps"] / rate) for rate in bare)
    # A row without a measurement gives the reason, and no row calls a transfer through plain memory GDS.
    assert all(row["gbps"] or row["p99_ms"] or row["note"] for row in compared)
    assert not any("GDS" in row["note"] or "GPUDirect" in row["note"] for row in compared)


@pytest.mark.skipif(c_ext.cuda_info()["device_count"] > 0, reason="measures the GPU instead")
def test_a_part_alone_writes_its_rows_alone(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    arguments = ["transfer", "--megabytes", "1", "--repeats", "1", "--json", str(out), "--part"]
    assert CliRunner().invoke(command, [*arguments, "transform"]).exit_code == 0
    content = json.loads(out.read_text())
    assert (content["rows"], content["parts"]) == ([], ["transform"])
    assert {row["what"] for row in content["comparisons"]} == {"layout transform"}
    assert content["thresholds"] == c_ext.CUDA_THRESHOLDS
    assert CliRunner().invoke(command, [*arguments, "nonsense"]).exit_code == 2


@pytest.mark.skipif(c_ext.cuda_info()["device_count"] > 0, reason="measures the GPU instead")
def test_what_was_measured_before_a_failure_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("cut")

    out = tmp_path / "rows.json"
    monkeypatch.setattr(bench_command, "transform_rows", fail)
    done = CliRunner().invoke(
        command, ["transfer", "--megabytes", "1", "--repeats", "1", "--seconds", "1", "--json", str(out)]
    )
    assert str(done.exception) == "cut"
    content = json.loads(out.read_text())
    assert content["parts"] == ["lanes", "latency", "beside", "torch", "small"]
    assert {row["run_bytes"] for row in content["rows"]} >= {4096, 32768}
    assert {row["what"] for row in content["comparisons"]} == {"torch index_select + copy", "4 KiB copy, p99"}
    assert content["limit_gbps"]["H2D"] > 0


TOTALS: c_ext.GdsTotals = {
    "transfers": 2,
    "pages": 10,
    "straight_pages": 10,
    "failed_pages": 0,
    "io_calls": 20,
    "bounced_calls": 0,
    "unknown_calls": 0,
    "io_bytes": 1 << 20,
    "launches": 2,
}


@pytest.mark.parametrize(
    ("counted", "path"),
    [
        ({}, "direct"),
        ({"straight_pages": 0}, "staged"),
        ({"straight_pages": 9}, "staged in part"),
        ({"bounced_calls": 1}, "bounced"),
        ({"unknown_calls": 1}, "not known"),
    ],
)
def test_direct_is_what_every_call_went(counted: dict[str, int], path: str) -> None:
    totals: Any = TOTALS | counted
    assert path_of_totals(totals) == path


@pytest.mark.skipif(c_ext.cuda_info()["device_count"] > 0, reason="measures the GPU instead")
def test_what_stands_behind_a_disks_rows_is_asked_after_their_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(c_ext.GdsLane, "describe", lambda lane: f"after {lane.totals['io_calls'] > 0}")
    rows = disk_rows(None, 0, tmp_path, 1 << 20, 1, TransferConfig())
    notes = {row.note for row in rows if row.what.startswith("disk to pool")}
    assert notes == {"after True; share of the bare reads"}


def test_a_length_of_run_is_kept_as_soon_as_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.json"
    seen = []

    class Bench(TransferBench):
        def run(self):
            for rows in super().run():
                yield rows
                seen.append(len(json.loads(out.read_text())["rows"]))

    monkeypatch.setattr(bench_command, "TransferBench", Bench)
    arguments = ["transfer", "--megabytes", "1", "--repeats", "1", "--json", str(out), "--part", "lanes"]
    assert CliRunner().invoke(command, arguments).exit_code == 0
    assert seen == sorted(set(seen))
    assert len(seen) > 3


def test_a_device_that_is_not_there_is_refused() -> None:
    missing = str(c_ext.cuda_info()["device_count"])
    done = CliRunner().invoke(command, ["transfer", "--device", missing])
    assert done.exit_code != 0
    assert "CUDA device" in str(done.exception)


@pytest.mark.parametrize("option", ["--json", "--png"])
def test_a_result_that_finds_no_place_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    def measured(*_: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(bench_command, "TransferBench", measured)
    for path, reason in ((tmp_path / "no" / "rows", "does not exist"), (tmp_path, "is a folder")):
        done = CliRunner().invoke(command, ["transfer", option, str(path)])
        assert done.exit_code == 2, (done.output, done.exception)
        assert reason in " ".join(done.output.split())
    done = CliRunner().invoke(command, ["transfer", option, str(tmp_path / f"rows.{option[2:]}")])
    assert str(done.exception) == "measured"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--png", "rows.txt"], "rows.txt: a picture's name ends in .png"),
        (["--device", "99999999999999999999"], "99999999999999999999 is not in the range x<=2147483647"),
        (["--folder", ".", "--part", "lanes"], "--folder is for --part disk, which is not among lanes"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    def measured(*_: object) -> None:
        raise AssertionError("measured")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_command, "TransferBench", measured)
    done = CliRunner().invoke(command, ["transfer", *arguments])
    assert done.exit_code == 2, (done.output, done.exception)
    assert words in " ".join(done.output.split())


def test_a_folder_that_takes_no_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", "made")

    monkeypatch.setattr(bench_command, "disk_rows", refuse)
    arguments = ["--megabytes", "1", "--repeats", "1", "--part", "disk", "--folder", str(tmp_path)]
    done = CliRunner().invoke(command, ["transfer", *arguments])
    assert done.exit_code == 1
    assert f"--folder {tmp_path}: [Errno 2] No such file or directory: 'made'" in " ".join(
        done.output.split()
    )


def test_settings_of_the_lane_are_obeyed_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[TransferConfig] = []

    def measured(device: object, total: int, repeats: int, settings: TransferConfig) -> None:
        seen.append(settings)
        raise AssertionError("measured")

    monkeypatch.setattr(bench_command, "TransferBench", measured)
    monkeypatch.setenv("FLEXKV_TRANSFER_COPY_KERNEL", "false")
    CliRunner().invoke(command, ["transfer", "--part", "lanes"])
    assert [(one.copy_kernel, one.batch_copies) for one in seen] == [(False, True)]
    monkeypatch.setenv("FLEXKV_TRANSFER_COPY_KERNEL", "maybe")
    refused = CliRunner().invoke(command, ["transfer", "--part", "lanes"]).exception
    assert isinstance(refused, ConfigError)
    assert "FLEXKV_TRANSFER_COPY_KERNEL" in str(refused)


def test_the_rows_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "rows.png"
    done = CliRunner().invoke(
        command, ["transfer", "--megabytes", "1", "--repeats", "1", "--seconds", "1", "--png", str(picture)]
    )
    assert done.exit_code == 0, (done.output, done.exception)
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert len(picture.read_bytes()) > 10_000  # a picture of only the axes is smaller


def test_without_matplotlib_drawing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    picture = tmp_path / "rows.png"
    done = CliRunner().invoke(
        command, ["transfer", "--megabytes", "1", "--repeats", "1", "--png", str(picture)]
    )
    assert done.exit_code == 2
    assert "needs matplotlib" in done.output
    assert not picture.exists()


def test_the_disk_alone_needs_a_folder_on_it() -> None:
    done = CliRunner().invoke(command, ["transfer", "--part", "disk", "--megabytes", "1"])
    assert done.exit_code == 2
    assert "--part disk needs --folder" in done.output


def test_results_go_where_a_link_points(tmp_path: Path) -> None:
    target, link = tmp_path / "kept" / "rows.json", tmp_path / "link.json"
    target.parent.mkdir()
    target.write_text("old")
    link.symlink_to(target)
    ResultFile(link, {"device": None}).part_ended("lanes")
    assert link.is_symlink()
    assert json.loads(target.read_text())["parts"] == ["lanes"]


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        ResultFile(link, {"device": None}).part_ended("lanes")
        lines = os.read(reader, 1 << 16).decode().splitlines()
    finally:
        os.close(reader)
    assert [json.loads(line)["parts"] for line in lines] == [[], ["lanes"]]
    assert pipe.is_fifo()
    assert link.is_symlink()


def test_a_pipe_without_a_path_of_its_own_is_written_to() -> None:
    reader, writer = os.pipe()
    try:
        ResultFile(Path(f"/dev/fd/{writer}"), {"device": None})
        assert json.loads(os.read(reader, 1 << 16))["parts"] == []
    finally:
        os.close(reader)
        os.close(writer)
