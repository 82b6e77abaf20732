"""Runs the steps of a stage as child processes within a time limit, and writes what came of each as it ends.

The file of a stage has the machine in it before the first step starts, and is replaced as a whole after every step: a
run that is cut keeps what it has measured, and the next call goes on behind it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu_machine import ROOT

State = Literal["passed", "failed", "cut", "running", "not run"]
ENDED: tuple[State, ...] = ("passed", "failed")
"""Steps in one of these states are results, and are not run again."""

TERM_S = 5.0
"""Between asking a child to end and ending it."""
TAIL_BYTES = 4000
"""Of what a step printed, that its record keeps; all of it is in the step's log."""
PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""
LAST_CHARACTERS = 160
"""Of the last line of a step that failed, beside its outcome."""
SHORTEST_S = 5.0
"""A step is not begun with less left of its stage."""


@dataclass(frozen=True, slots=True)
class Step:
    """One child process.

    Attributes:
        command: its argument vector, run in the project's folder.
        limit_s: after which it is ended, if the stage's own limit does not come first.
        result: name of the file, in the folder of results, that it writes.
        missing: why it cannot run here; empty where it can.
        required: the stage ends where it fails.
        environ: beside this process's own.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    result: str = ""
    missing: str = ""
    required: bool = False
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stage:
    """Steps that one call runs, within `limit_s` seconds together."""

    name: str
    limit_s: float
    steps: tuple[Step, ...]


def stage_file(folder: Path, stage: str) -> Path:
    return folder / f"{stage}.json"


def read_stage(folder: Path, stage: str) -> dict[str, Any]:
    """What a stage has written so far; without any steps where it never ran."""
    path = stage_file(folder, stage)
    if not path.exists():
        return {"stage": stage, "machine": {}, "steps": []}
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def run_stage(
    stage: Stage,
    folder: Path,
    machine: Mapping[str, str],
    not_here: Mapping[str, str] | None = None,
    again: bool = False,
) -> list[State]:
    """Runs what has no result yet, and returns the state of every step.

    Args:
        folder: of results; made where it is not there.
        machine: what this runs on, by name.
        not_here: what of the whole plan this machine lacks, and why.
        again: also what has a result.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = {} if again else {step["name"]: step for step in read_stage(folder, stage.name)["steps"]}
    records: list[dict[str, Any]] = [
        before[step.name]
        if before.get(step.name, {}).get("state") in ENDED
        else {"name": step.name, "command": list(step.command), "result": step.result, "state": "not run",
              "why": step.missing or "the stage ended before it"}
        for step in stage.steps
    ]  # fmt: skip
    ends_s = time.monotonic() + stage.limit_s

    def write() -> None:
        content = {
            "stage": stage.name,
            "machine": dict(machine),
            "not_here": dict(not_here or {}),
            "limit_s": stage.limit_s,
            "steps": records,
        }
        beside = folder / f".{stage.name}.part"
        beside.write_text(json.dumps(content, indent=1))
        os.replace(beside, stage_file(folder, stage.name))

    write()
    with _ended_by_term():
        for step, record in zip(stage.steps, records, strict=True):
            if record["state"] in ENDED or step.missing:
                continue
            left_s = ends_s - time.monotonic()
            if left_s < SHORTEST_S:
                break
            record |= {
                "state": "running",
                "why": "the call was cut while it ran",
                "date": time.strftime("%F %T"),
            }
            write()
            print(f"{stage.name}: {step.name} ...", flush=True)
            record |= _run(step, folder, stage.name, min(step.limit_s, left_s))
            write()
            print(f"{stage.name}: {step.name}: {record['state']}, {record['seconds']:.0f} s", flush=True)
            if step.required and record["state"] != "passed":
                break
    return [record["state"] for record in records]


def _run(step: Step, folder: Path, stage: str, limit_s: float) -> dict[str, Any]:
    log = folder / f"{stage}-{step.name.replace(' ', '-')}.log"
    began_s = time.monotonic()
    with log.open("wb") as output:
        # A session of its own, so that what it starts ends with it.
        child = subprocess.Popen(
            list(step.command),
            cwd=ROOT,
            env={**os.environ, **step.environ},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        try:
            child.wait(limit_s)
            cut = False
        except subprocess.TimeoutExpired:
            cut = True
        finally:
            _end(child)
    state: State = "cut" if cut else "passed" if child.returncode == 0 else "failed"
    tail = log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
    last = next((line.strip() for line in reversed(tail.splitlines()) if line.strip()), "nothing was printed")
    failed = f"exit {child.returncode}: {last[:LAST_CHARACTERS]}"
    why = f"ended after {limit_s:.0f} s" if cut else "" if child.returncode == 0 else failed
    return {"state": state, "why": why, "seconds": time.monotonic() - began_s, "tail": tail}


def _die_with_parent() -> None:
    """In the child: ends it with this process, also where that is killed; it would measure beside the next call."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends the child and all of its session that are left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            break
        try:
            child.wait(TERM_S)
        except subprocess.TimeoutExpired:
            continue
    child.wait(TERM_S)


@contextmanager
def _ended_by_term() -> Iterator[None]:
    """A SIGTERM ends the child that runs, too."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
