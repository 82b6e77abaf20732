"""`flexkv peers` shows which units share pages with each other, and which units do not respond."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from flexkv.cli import peers_command
from flexkv.cli.peers_command import SILENT_EXIT_CODE, command
from flexkv.peers.card import SHOWN_DIGITS
from flexkv.peers.runtime_folder import socket_path, write_card
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.vllm_objects import make_request
from tests.unit.peers.live_engines import PROMPT, knows, settings_of, share_of, wait_for


def test_shows_units_and_what_they_have(make_engine: Callable[..., MiniEngine], tmp_path: Path) -> None:
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


def shown(folder: Path) -> Result:
    return CliRunner().invoke(command, ["--folder", str(folder)], standalone_mode=False, terminal_width=200)


def test_a_unit_that_has_ended_or_is_silent_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    write_card(folder, "0" * 16, {"pid": 7, "model": "gone"})
    found = shown(folder)
    assert found.return_value == SILENT_EXIT_CODE
    assert "process 7 (00000000): has ended" in found.output
    monkeypatch.setattr(peers_command, "ANSWER_S", 0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(str(socket_path(folder, "0" * 16)))
        door.listen(1)
        found = shown(folder)
    assert found.return_value == SILENT_EXIT_CODE
    assert "process 7 (00000000): does not answer" in found.output


def test_the_command_says_why_units_do_not_share(
    make_engine: Callable[..., MiniEngine], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    engine = make_engine(**settings_of(folder))
    share = share_of(engine)
    assert "does not share" not in shown(folder).output
    share.wants(share._card.short() | {"pid": 7, "weights": "others"})
    found = shown(folder)
    assert found.return_value == 0
    told = " ".join(found.output.split())
    assert f"process {os.getpid()} ({share._card.unit[:SHOWN_DIGITS]}) does not share with process 7" in told
    assert "its weights are others" in told


def test_the_command_shows_what_units_keep_once_and_have_on_disk(
    make_engine: Callable[..., MiniEngine], tmp_path: Path
) -> None:
    folder = tmp_path / "run"

    def engine(name: str) -> MiniEngine:
        disk = {"disk.folders": str(tmp_path / name), "disk.bytes_per_folder": 4 << 20}
        return make_engine(**settings_of(folder) | disk | {"peers.store": "once"})

    one, other = engine("a"), engine("b")
    one.run(make_request(PROMPT, "one"))
    one.until(lambda: not one.unit.busy)
    wait_for(lambda: knows(other, 5))
    other.run(make_request(PROMPT, "two"))
    found = CliRunner().invoke(command, ["--folder", str(folder), "--json"])
    (row,) = {unit["unit"]: unit for unit in json.loads(found.output)}[share_of(other)._card.unit]["peers"]
    assert (row["host_pages"], row["disk_pages"], row["copied"]) == (5, 5, 5)
    assert "stores once: 5 pages left out, which others keep, 0 promoted, 0 lost" in shown(folder).output


def test_says_that_nobody_shares(tmp_path: Path) -> None:
    assert "no unit shares" in CliRunner().invoke(command, ["--folder", str(tmp_path)]).output
