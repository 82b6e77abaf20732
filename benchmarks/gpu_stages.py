"""Runs the steps of a stage as child processes within a time limit, and writes the outcome of each as it ends.

The file of a stage names the machine before the first step starts, and is replaced as a whole after every step: an
interrupted run keeps its measurements, and the next call continues after them.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu_files import RefusedError, UnreadableError, held, reading, write_whole
from benchmarks.gpu_machine import ROOT

State = Literal["passed", "failed", "cut", "running", "not run"]
ENDED: tuple[State, ...] = ("passed", "failed")
"""Steps in one of these states are results, and are not run again."""
BEGUN: tuple[State, ...] = (*ENDED, "cut", "running")
"""A step in one of these states may have written its file."""

TERM_S = 5.0
"""Seconds between asking a child to end and killing it."""
ENDING_S = 3 * TERM_S
"""Seconds that `_end` takes at most: a stage may end this much later than its limit."""
TAIL_BYTES = 4000
"""Bytes of a step's output that its record keeps; all of it is in the step's log."""
PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""
LAST_CHARACTERS = 160
"""Characters of a failed step's last line that are shown beside its outcome."""
SHORTEST_S = 5.0
"""A step is not begun with less time left for its stage."""


@dataclass(frozen=True, slots=True)
class Step:
    """One child process.

    Attributes:
        command: its argument vector, run in the project's folder.
        limit_s: seconds after which it is ended, unless the stage's own limit comes first.
        result: name of the file that it writes in the folder of results.
        missing: why it cannot run here; empty if it can.
        required: the stage ends if this step fails.
        environ: variables beside this process's own.
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
    """The content that a stage has written so far; without steps if it never ran.

    Raises:
        UnreadableError: the file is not a stage's, or is incomplete.
    """
    path = stage_file(folder, stage)
    if not path.exists():
        return {"stage": stage, "machine": {}, "steps": []}
    with reading(path):
        content: dict[str, Any] = json.loads(path.read_text())
        content["stage"], content["machine"].items()
        for step in content["steps"]:
            step["name"], step["state"], step["result"].strip()
    return content


def run_stage(
    stage: Stage,
    folder: Path,
    machine: Mapping[str, str],
    not_here: Mapping[str, str] | None = None,
    again: bool = False,
    began_s: float | None = None,
) -> list[State]:
    """Runs the steps that have no result yet, and returns the state of every step.

    Args:
        folder: folder of results; created if it does not exist.
        machine: facts about the machine that this runs on, by name.
        not_here: the parts of the whole plan that this machine cannot run, and why.
        again: also runs steps that have a result.
        began_s: start of the stage's limit, by `time.monotonic`; None: now.
    Raises:
        RefusedError: another call uses the folder, or it has results of another machine or source. Nothing was run.
    """
    ends_s = (time.monotonic() if began_s is None else began_s) + stage.limit_s
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder):
        before = {} if again else _kept(stage.name, folder, machine)
        records = []
        for step in stage.steps:
            if step.name not in before:
                # The file is from an earlier call whose record no longer exists.
                _forget_result(step, folder)
            records.append(before.get(step.name) or _not_yet(step))
        content = {
            "stage": stage.name,
            "machine": dict(machine),
            "not_here": dict(not_here or {}),
            "limit_s": stage.limit_s,
            "steps": records,
        }
        _run_steps(stage, folder, content, ends_s)
    return [record["state"] for record in records]


def _kept(stage: str, folder: Path, machine: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The records of steps that were begun, by name. If the file cannot be read, prints why and returns no records.

    Raises:
        RefusedError: they are from another machine, whose figures would be shown as this machine's.
    """
    try:
        content = read_stage(folder, stage)
    except UnreadableError as error:
        print(f"{stage}: no result is kept, because {error}", flush=True)
        return {}
    kept = {step["name"]: step for step in content["steps"] if step["state"] in BEGUN}
    then = content["machine"]
    differ = [
        f"{name} was {then.get(name, 'unknown')} and is {machine.get(name, 'unknown')}"
        for name in dict.fromkeys([*then, *machine])
        if name != "date" and then.get(name) != machine.get(name)
    ]
    if kept and differ:
        raise RefusedError(
            f"{stage_file(folder, stage)} has results of something else: {'; '.join(differ)}. "
            "--again measures all of the stage anew; another --out keeps both"
        )
    return kept


def _not_yet(step: Step) -> dict[str, Any]:
    why = step.missing or "the stage ended before it"
    return {
        "name": step.name,
        "command": list(step.command),
        "result": step.result,
        "state": "not run",
        "why": why,
    }


def _forget_result(step: Step, folder: Path) -> None:
    if step.result:
        (folder / step.result).unlink(missing_ok=True)


def _run_steps(stage: Stage, folder: Path, content: Mapping[str, Any], ends_s: float) -> None:
    """Runs the stage's steps that have not ended, and keeps their records in the stage's file."""

    def write() -> None:
        write_whole(stage_file(folder, stage.name), json.dumps(content, indent=1))

    write()
    pairs = [
        (step, record)
        for step, record in zip(stage.steps, content["steps"], strict=True)
        if record["state"] not in ENDED and not step.missing
    ]
    with _ended_by_term():
        for number, (step, record) in enumerate(pairs):
            left_s = ends_s - time.monotonic()
            if left_s < SHORTEST_S:
                break
            limit_s = fair_limit_s(left_s, [later.limit_s for later, _ in pairs[number:]])
            _forget_result(step, folder)
            record |= {
                **_not_yet(step),
                "state": "running",
                "why": "the call was cut while it ran",
                "date": time.strftime("%F %T"),
            }
            write()
            print(f"{stage.name}: {step.name} ...", flush=True)
            record |= _run(step, folder, stage.name, limit_s)
            write()
            print(f"{stage.name}: {step.name}: {record['state']}, {record['seconds']:.0f} s", flush=True)
            # A process that cannot be ended would distort every later measurement.
            if record["left"] or (step.required and record["state"] != "passed"):
                break


def fair_limit_s(left_s: float, limits_s: Sequence[float]) -> float:
    """Seconds that the first of these steps may take: its own limit, or its share of the time left if that does not
    suffice for all limits. Time that a step does not use goes to later steps.
    """
    return min(limits_s[0], max(SHORTEST_S, left_s * limits_s[0] / sum(limits_s)), left_s)


def _run(step: Step, folder: Path, stage: str, limit_s: float) -> dict[str, Any]:
    log = folder / f"{stage}-{step.name.replace(' ', '-')}.log"
    began_s = time.monotonic()
    with log.open("wb") as output:
        # A session of its own, so that processes which it starts end with it.
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
            ended = _end(child)
    state: State = "cut" if cut else "passed" if child.returncode == 0 else "failed"
    tail = log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
    last = next((line.strip() for line in reversed(tail.splitlines()) if line.strip()), "nothing was printed")
    failed = f"exit {child.returncode}: {last[:LAST_CHARACTERS]}"
    why = f"ended after {limit_s:.0f} s" if cut else "" if child.returncode == 0 else failed
    if not ended:
        why = f"process {child.pid} did not end after {limit_s:.0f} s, nor when it was killed"
    seconds = time.monotonic() - began_s
    return {"state": state, "why": why, "seconds": seconds, "tail": tail, "left": not ended}


def _die_with_parent() -> None:
    """Runs in the child: makes it end with this process, even if this process is killed. Otherwise it would run beside
    the next call's measurements.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def _end(child: subprocess.Popen[bytes]) -> bool:
    """Ends the child and the rest of its session; returns whether that worked. A process that waits inside a driver
    does not end before the driver lets it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            break
        try:
            child.wait(TERM_S)
        except subprocess.TimeoutExpired:
            continue
    try:
        child.wait(TERM_S)
    except subprocess.TimeoutExpired:
        return False
    return True


@contextmanager
def _ended_by_term() -> Iterator[None]:
    """Makes a SIGTERM end the running child, too."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
