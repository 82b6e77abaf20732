"""`benchmarks.control_plane --check` compares a run with a saved run. These tests check which rows count as slower."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import control_plane
from benchmarks.control_plane import LEAST_US, SLOWER, Row, slower_rows


def row(name: str, cpu_min_us: float) -> Row:
    return Row(name, None, 2 * cpu_min_us, cpu_min_us, 2 * cpu_min_us, cpu_min_us)


def saved(*rows: Row) -> dict[str, object]:
    return {"rows": [asdict(each) for each in rows]}


def test_a_row_that_takes_much_longer_is_named_with_both_times() -> None:
    before = saved(row("match", 10.0), row("store", 20.0))
    assert slower_rows([row("match", 10.0 * SLOWER), row("store", 5.0)], before) == []
    (line,) = slower_rows([row("match", 14.0), row("store", 20.0)], before)
    assert line == "match: 14.0 us, before 10.0"


def test_rows_too_short_to_tell_are_not_compared() -> None:
    assert slower_rows([row("waits", LEAST_US)], saved(row("waits", 0.1))) == []


def test_rows_that_only_one_of_the_runs_has_are_named() -> None:
    lines = slower_rows([row("new", 5.0)], saved(row("old", 5.0)))
    assert lines == ["new: not in the saved run", "old: was not measured"]


@pytest.mark.parametrize(("now_us", "status"), [(10.0, 0), (20.0, 1)])
def test_the_command_ends_with_status_1_where_a_row_is_slower(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    now_us: float,
    status: int,
) -> None:
    monkeypatch.setattr(control_plane, "bench_manager", lambda rounds: ([row("match", now_us)], 100.0))
    for name in ("disk_lookup", "index", "tier_lookup", "keys"):
        monkeypatch.setattr(control_plane, f"bench_{name}", lambda rounds: [])
    file = tmp_path / "before.json"
    file.write_text(json.dumps(saved(row("match", 10.0))))
    monkeypatch.setattr(sys, "argv", ["control_plane", "--check", str(file)])
    with pytest.raises(SystemExit) as ended:
        control_plane.main()
    assert ended.value.code == status
    assert ("match: 20.0 us, before 10.0" in capsys.readouterr().out) == bool(status)
