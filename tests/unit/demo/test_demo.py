"""The demo's own judgement: it exits with 0 only if every answer agrees and flexkv served what it should."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from demo import __main__ as demo
from demo.conversation import CROWD, CROWD_TURNS, PHASES, TURNS, Turn, problems, turn_count, whole_blocks
from demo.engine_process import EngineError
from tests.unit.demo.scripted_engine import ScriptedEngine

Engine = type[ScriptedEngine]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    class ThisEngine(ScriptedEngine):
        pass

    monkeypatch.setattr(demo, "EngineProcess", ThisEngine)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return ThisEngine


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
    assert f"OK {turn_count()} answers equal those without flexkv" in said
    # No terminal here: a line a phase instead of a bar.
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
