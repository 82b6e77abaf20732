"""`flexkv bench transfer` on plain memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from flexkv import c_ext
from flexkv.cli.bench_command import command


@pytest.mark.skipif(c_ext.cuda_info()["device_count"] > 0, reason="measures the GPU instead")
def test_without_a_gpu_the_host_lanes_are_measured_and_said_to_be(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    arguments = [
        "transfer",
        "--megabytes",
        "4",
        "--repeats",
        "1",
        "--json",
        str(out),
        "--folder",
        str(tmp_path),
    ]
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 0, (done.output, done.exception)
    assert "say nothing of a GPU" in done.output
    assert "most_batch_copies = 4096" in done.output
    content = json.loads(out.read_text())
    assert content["device"] is None
    rows = content["rows"]
    assert {row["path"] for row in rows} == {"cpu"}
    assert {row["direction"] for row in rows} == {"H2D", "D2H", "both"}
    assert all(row["gbps"] > 0 for row in rows)
    compared = content["comparisons"]
    assert {row["what"] for row in compared} == {
        "torch index_select + copy",
        "4 KiB copy, p99",
        "layout transform",
        "disk to pool, staged",
        "disk to pool, a call a run",
        "disk to pool, block-first: direct",
        "disk to host page to pool",
    }
    # 80 layers of K and V are 160 runs of a page: a call each and one for the trailer, or one for all.
    pages = {row["run_bytes"]: row["calls"] for row in compared if row["what"] == "disk to host page to pool"}
    for row in compared:
        if row["what"] == "disk to pool, staged":
            assert row["calls"] == pages[row["run_bytes"]] > 0
        if row["what"] == "disk to pool, a call a run":
            assert row["calls"] == 161 * pages[row["run_bytes"]]
    assert list(tmp_path.iterdir()) == [out]
    # What did not run says why; and nothing that went through plain memory is called GDS.
    assert all(row["gbps"] or row["p99_ms"] or row["note"] for row in compared)
    assert not any("GDS" in row["note"] or "GPUDirect" in row["note"] for row in compared)


def test_a_device_that_is_not_there_is_refused() -> None:
    missing = str(c_ext.cuda_info()["device_count"])
    done = CliRunner().invoke(command, ["transfer", "--device", missing])
    assert done.exit_code != 0
    assert "CUDA device" in str(done.exception)
