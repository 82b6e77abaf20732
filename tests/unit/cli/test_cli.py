"""The command line: output, exit codes, and errors without a traceback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flexkv.cache.manager import LocalCacheManager
from flexkv.cli.config_command import markdown_reference
from flexkv.cli.main import COMMANDS, main
from flexkv.errors import ContractError
from flexkv.observe.metrics import markdown_table

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("FLEXKV_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")


def test_show_tells_value_and_origin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXKV_HOST_BYTES", "40GiB")
    assert main(["config", "show", "--extra", '{"lazy_offload": true}']) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "42949672960 (40.0 GiB)" in lines["host.bytes"]
    assert "env FLEXKV_HOST_BYTES" in lines["host.bytes"]
    assert "lazy" in lines["store.mode"]
    assert "engine extra config" in lines["store.mode"]
    assert "default" in lines["load.mode"]


def test_show_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["load.deadline_s"] == {"value": 30.0, "origin": "default"}


@pytest.mark.parametrize("extra", ["{", "[]", '{"host.byts": 1}'])
def test_errors_are_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str], extra: str) -> None:
    assert main(["config", "show", "--extra", extra]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert len(captured.err.splitlines()) == 1


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nonsense"]) == 2
    assert "nonsense" in capsys.readouterr().err


def test_the_module_is_the_command_and_has_no_traceback() -> None:
    environ = {**os.environ, "FLEXKV_HOST_BYTS": "1"}
    command = [sys.executable, "-m", "flexkv", "config", "show"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environ, timeout=60)
    assert done.returncode == 2
    assert "FLEXKV_HOST_BYTES" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main([name, "--help"]) == 0
    assert "Usage: flexkv" in capsys.readouterr().out


def test_info_describes_build_and_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {"flexkv", "native core", "cpus", "memory", "host tier", "huge pages, private"} <= set(facts)


def test_simulate_repeats_a_seed(capsys: pytest.CaptureFixture[str]) -> None:
    runs = []
    for _ in range(2):
        assert main(["simulate", "--seed", "5", "--steps", "300", "--json"]) == 0
        runs.append(json.loads(capsys.readouterr().out))
    assert runs[0] == runs[1]
    assert runs[0]["steps"] == 300
    assert main(["simulate", "--steps", "50"]) == 0
    assert "no rule broken" in capsys.readouterr().out


def test_simulate_names_seed_and_step_of_a_broken_rule(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: LocalCacheManager, request_id: str) -> None:
        raise ContractError("broken on purpose")

    monkeypatch.setattr(LocalCacheManager, "release", broken)
    assert main(["simulate", "--seed", "7", "--steps", "2000"]) == 1
    assert re.search(r"seed 7, after step \d+ of 2000.*broken on purpose", capsys.readouterr().err)


def test_documentation_holds_the_generated_tables() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    assert markdown_reference() in text, "paste the output of `flexkv config docs` into docs/configuration.md"
    assert markdown_table() in (ROOT / "docs" / "metrics.md").read_text(), (
        "update the table in docs/metrics.md"
    )
