"""`make bench` calls each benchmark with the option `--json`, and every benchmark accepts this option."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_all_programs_that_make_runs_write_their_results() -> None:
    programs = {path.stem: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
    programs = {name: text for name, text in programs.items() if "__main__" in text}
    left_out = re.search(r"BENCHMARKS = \$\(filter-out ([\w ]+),", (ROOT / "Makefile").read_text())
    assert left_out is not None
    without = {name for name, text in programs.items() if '"--json"' not in text}
    assert without | {"gpu_results"} == set(left_out[1].split())
