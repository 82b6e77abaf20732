"""Runs `python -m demo` from start to end with the smallest model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN_S = 600


@pytest.mark.timeout(RUN_S + 60)
def test_the_demo_shows_what_it_promises(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "demo", "--model", "tiny", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("prompt", "TTFT ms", "GB/s", "cold 0.0", "warm 0.0", "crowd 8.1", "token for token"):
        assert word in done.stdout
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads((tmp_path / "demo.json").read_text())
    assert result["problems"] == []
    assert [turn["answer"] for turn in result["turns"]] == [
        turn["answer"] for turn in result["without_flexkv"]
    ]
    served = {turn["phase"]: turn["tokens_from_flexkv"] for turn in result["turns"]}
    assert served["cold"] == 0
    assert served["warm"] > 1000
    assert served["crowd"] > 500


@pytest.mark.long
@pytest.mark.timeout(RUN_S + 60)
def test_the_demo_of_blending_shows_what_it_promises(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "demo.blend", "--model", "tiny", "--rounds", "2", "--out", str(tmp_path)]
    command += ["--document-tokens", "96"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "demo-blend.png").read_bytes().startswith(b"\x89PNG")
    rows = {row["name"]: row for row in json.loads((tmp_path / "demo-blend.json").read_text())["rows"]}
    assert rows["1"]["off"] == 0
    assert rows["0.15"]["off"] > 0, "nothing was reused"
