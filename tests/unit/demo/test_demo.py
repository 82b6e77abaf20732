"""The demo checks its own result: it exits with 0 only if all answers agree and flexkv served the expected tokens."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.measure import Measurement

from demo import __main__ as demo
from demo import hybrid
from demo.__main__ import TABLE_WIDTH
from demo.conversation import CROWD, CROWD_TURNS, PHASES, TURNS, Turn, problems, turn_count, whole_blocks
from demo.engine_process import FLEXKV, EngineError
from demo.headline import headline, next_steps
from demo.report import LEGEND, table
from flexkv.cli.main import main as cli
from flexkv.config import load_config
from tests.unit.demo.scripted_engine import ScriptedEngine

Engine = type[ScriptedEngine]
WINDOWS = hybrid.HybridRun((1, 2), (1, 2), (1, 2), cached=1376, stored_pages=100)
"""A good result of the second part of the demo. These tests do not run that part, because it needs real engines."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    class ThisEngine(ScriptedEngine):
        pass

    monkeypatch.setattr(demo, "EngineProcess", ThisEngine)
    monkeypatch.setattr(hybrid, "play", lambda folder, log, now: WINDOWS)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return ThisEngine


def turn(phase: str, alone_s: float, with_s: float, served: int, answer: int = 0) -> tuple[Turn, Turn]:
    """Returns two records: that of a turn with flexkv, and that of the same turn without it."""
    mine = Turn(phase, 0, 0, 64, (answer,), with_s, served)
    return mine, Turn(phase, 0, 0, 64, (0,), alone_s)


def told(*pairs: tuple[Turn, Turn]) -> list[str]:
    return list(headline([mine for mine, _ in pairs], [theirs for _, theirs in pairs]))


def test_the_headline_has_the_least_and_the_median_gain_and_what_a_miss_costs() -> None:
    equal, gain, cost = told(
        turn("cold", 0.9, 1.0, 0),
        turn("warm", 1.0, 0.1, 32),
        turn("warm", 1.0, 0.25, 32),
        turn("disk", 1.0, 2.0, 32),
    )
    assert equal.endswith("token for token: 4/4")
    # The report includes the turn whose hit was slower than computing the prompt.
    assert (
        "in the 3 turns in which it served tokens: least 0.5, median 4.0 (medians: warm 7.0, disk 0.5)"
        in gain
    )
    assert "in the 1 turns in which it had none to serve: median 0.90" in cost


def test_the_headline_counts_answers_that_differ_and_claims_no_gain_without_a_hit() -> None:
    equal, cost = told(turn("cold", 1.0, 1.0, 0), turn("cold", 1.0, 1.0, 0, answer=1))
    assert equal.endswith("token for token: 1/2")
    assert "none to serve" in cost


def test_the_next_steps_are_commands_that_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = [shlex.split(line) for line in next_steps(tmp_path / "a model") if line.startswith("  ")]
    info, server, serve, *makes = commands
    assert info[1:] == ["-m", "flexkv", "info"]
    assert cli(info[3:]) == 0
    assert server[server.index("--model") + 1] == str(tmp_path / "a model")
    for command in (server, serve):
        config = json.loads(command[command.index("--kv-transfer-config") + 1])
        load_config(config.get("kv_connector_extra_config"), {})
        assert config.items() >= FLEXKV.items()
    targets = (Path(demo.__file__).resolve().parents[1] / "Makefile").read_text()
    assert all(f"\n{name}:" in targets for _, name in makes)


def test_stored_and_loaded_bytes_have_columns_of_their_own() -> None:
    mine = replace(turn("warm", 1.0, 1.0, 32)[0], stored_bytes=3 << 20, loaded_bytes=5 << 20)
    shown = table([mine], [mine])
    columns = {str(column.header).replace("\n", " "): list(column.cells) for column in shown.columns}
    assert columns["stored MiB"] == ["3.0"]
    assert columns["loaded MiB"] == ["5.0"]
    stores_only = table([replace(mine, loaded_bytes=0)], [mine])
    assert [list(column.cells) for column in stores_only.columns if "loaded" in str(column.header)] == [["-"]]


def test_the_largest_table_and_its_legend_fit_80_columns() -> None:
    mine = Turn("crowd", 8, 1, 10_000, (0,), 12.3456, 9984, 9999 << 20, 9999 << 20, 0.5)
    console = Console(width=200)
    assert Measurement.get(console, console.options, table([mine], [mine])).maximum <= TABLE_WIDTH == 80
    assert max(map(len, LEGEND.splitlines())) <= TABLE_WIDTH


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    def run() -> int:
        monkeypatch.setattr("sys.argv", ["demo", "--out", str(tmp_path), "--model", "tiny"])
        return demo.main()

    return run


def test_a_good_run_is_told_drawn_and_written(
    engine: Engine, run: Callable[[], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run() == 0
    said = capsys.readouterr().out
    assert f"token for token: {turn_count()}/{turn_count()}" in said
    # Since the output is not a terminal, the demo prints one line per phase instead of a progress bar.
    steps = ["starting vLLM with flexkv", "starting vLLM alone", "both engines: crowd"]
    assert [step for step in steps if step not in said.splitlines()] == []
    assert said.count("both engines: ") == len(PHASES)
    explained = {line.split()[0] for line in said.partition("turn   phase")[2].splitlines() if line.strip()}
    assert {phase.play.__name__ for phase in PHASES} < explained, "the legend"
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((tmp_path / "demo.json").read_text())
    assert written["problems"] == []
    assert len(written["turns"]) == turn_count() == 3 * TURNS + CROWD * CROWD_TURNS
    cold, warm = written["turns"][:TURNS], written["turns"][TURNS : 2 * TURNS]
    assert [turn["phase"] for turn in warm] == ["warm"] * TURNS
    assert cold[0]["tokens_from_flexkv"] == 0
    again = written["turns"][-TURNS:]
    assert [turn["phase"] for turn in again] == ["disk"] * TURNS
    for turn in [*warm, *again]:
        assert turn["tokens_from_flexkv"] >= whole_blocks(turn["prompt_tokens"])
        assert turn["loaded_bytes"] > 0


def test_a_second_run_in_the_same_folder_is_as_good(engine: Engine, run: Callable[[], int]) -> None:
    assert run() == 0
    assert run() == 0


def test_one_wrong_token_ends_with_1(
    engine: Engine, run: Callable[[], int], capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []

    def spoil(answer: list[int]) -> list[int]:
        asked.append(len(answer))
        return [*answer[:-1], answer[-1] + 1] if len(asked) == 9 else answer

    engine.spoil = staticmethod(spoil)
    assert run() == 1
    said = capsys.readouterr().out
    assert "FAILED" in said
    assert "differs from the run without flexkv at token 15" in said
    assert "OK" not in said


def test_windows_that_answer_otherwise_end_with_1(
    engine: Engine,
    run: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(hybrid, "play", lambda folder, log, now: replace(WINDOWS, hit=(1, 3)))
    assert run() == 1
    assert "windows: answers differ" in capsys.readouterr().out


@pytest.mark.parametrize("serve", [lambda tokens: 0, lambda tokens: min(tokens, 31)], ids=["none", "too few"])
def test_tokens_that_flexkv_did_not_serve_end_with_1(
    engine: Engine, run: Callable[[], int], serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.serve = staticmethod(serve)
    assert run() == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "turn warm 0.0: flexkv served" in said
    assert "turn disk 0.0: flexkv served" in said
    assert "turn crowd 8.1: flexkv served" in said
    assert "turn cold" not in said


def test_an_engine_that_fails_ends_with_1_and_its_words(
    engine: Engine,
    run: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*arguments: Any) -> Any:
        raise EngineError("generate: the engine has died")

    monkeypatch.setattr(engine, "generate", fail)
    assert run() == 1
    assert "the engine has died" in capsys.readouterr().out


def good_turns() -> list[Turn]:
    turns = [Turn("cold", 0, n, 64, tuple(range(16)), 0.1) for n in range(turn_count())]
    turns[-1] = replace(turns[-1], served=32, expects=32)
    return turns


def test_what_is_missing_is_a_problem_too() -> None:
    good = good_turns()
    assert list(problems(good, good)) == []
    assert list(problems(good[1:], good))
    assert list(problems(good[1:], good[1:]))
    assert list(problems([], []))
    short = [replace(turn, answer=turn.answer[:3]) for turn in good]
    assert list(problems(short, short))
    idle = [replace(turn, expects=0) for turn in good]
    assert "no turn expected flexkv to serve anything" in list(problems(idle, idle))


def test_an_interrupt_ends_it_in_a_word(
    engine: Engine,
    run: Callable[[], int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(self: ScriptedEngine, *_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "__enter__", interrupted)
    assert run() == 130
    assert capsys.readouterr().out.splitlines()[-1] == "interrupted"


def test_the_table_is_whole_in_a_log(
    engine: Engine,
    run: Callable[[], int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run() == 0
    assert "\N{HORIZONTAL ELLIPSIS}" not in capsys.readouterr().out
