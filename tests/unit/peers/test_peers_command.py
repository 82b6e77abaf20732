"""`flexkv peers` shows who shares with whom, and who does not answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from flexkv.cli.peers_command import command
from flexkv.peers.runtime_folder import write_card
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.vllm_objects import make_request
from tests.unit.peers.live_engines import PROMPT, knows, settings_of, share_of, wait_for


def test_shows_units_what_they_have_and_who_is_silent(
    make_engine: Callable[..., MiniEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    one, other = make_engine(**settings_of(folder)), make_engine(**settings_of(folder))
    one.run(make_request(PROMPT, "one"))
    wait_for(lambda: knows(other, 5) and share_of(one).joined == 1)
    other.run(make_request(PROMPT, "two"))
    found = CliRunner().invoke(command, ["--folder", str(folder), "--json"], standalone_mode=False)
    assert found.return_value == 0
    units = {unit["unit"]: unit for unit in json.loads(found.output)}
    assert len(units) == 2
    (row,) = units[share_of(other)._card.unit]["peers"]
    assert (row["unit"], row["host_pages"], row["copied"]) == (share_of(one)._card.unit, 5, 5)
    assert "copied" in CliRunner().invoke(command, ["--folder", str(folder)]).output
    write_card(folder, "0" * 16, {"pid": 7, "model": "gone"})
    silent = CliRunner().invoke(command, ["--folder", str(folder)], standalone_mode=False)
    # Where the units have not removed its file yet, it is named.
    assert silent.return_value == (1 if "has ended" in silent.output else 0)


def test_says_that_nobody_shares(tmp_path: Path) -> None:
    assert "no unit shares" in CliRunner().invoke(command, ["--folder", str(tmp_path)]).output
