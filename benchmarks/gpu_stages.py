"""Runs the steps of a stage as child processes within a time limit, and records the outcome of each step when it ends.

A stage's file describes the machine before the first step starts, and is replaced atomically after every step. An
interrupted run thus keeps its measurements, and the next call continues after them.
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
"""A step in one of these states has its result, and is not run again."""
BEGUN: tuple[State, ...] = (*ENDED, "cut", "running")
"""A step in one of these states may have written its result file."""

TERM_S = 5.0
"""Seconds that a child process may take to end after SIGTERM. Then it is killed."""
ENDING_S = 3 * TERM_S
"""Maximum number of seconds that `_end` takes. A stage may end this much later than its limit."""
TAIL_BYTES = 4000
"""The step's record contains the last bytes of the step's output, up to this many. The step's log contains all
output."""
PR_SET_PDEATHSIG = 1
"""The number of the prctl option with this name, from linux/prctl.h."""
LAST_CHARACTERS = 160
"""Maximum number of characters that the outcome of a failed step shows of the last line of the step's output."""
SHORTEST_S = 5.0
"""Seconds. No step is begun if its stage has less time left."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a stage: one child process.

    Attributes:
        command: the child's argument vector; it runs in the project's folder.
        limit_s: seconds after which the child is ended. The stage's own limit may end it earlier.
        result: name of the file that the child writes in the folder of results; empty if it writes none.
        missing: why the step cannot run on this machine; empty if it can.
        required: whether the stage ends if this step does not pass.
        environ: environment variables of the child, in addition to those of this process.
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
    """The steps that one call runs, within `limit_s` seconds in total."""

    name: str
    limit_s: float
    steps: tuple[Step, ...]


def stage_file(folder: Path, stage: str) -> Path:
    return folder / f"{stage}.json"


def read_stage(folder: Path, stage: str) -> dict[str, Any]:
    """Reads what a stage has written so far. If the stage never ran, the returned content has no steps.

    Raises:
        UnreadableError: the file was not written by a stage, or is incomplete.
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
        machine: facts about this machine, by name.
        not_here: the measurements that this machine cannot run, from all stages, each with the reason.
        again: whether to run steps again that have a result.
        began_s: when the stage's time began, by `time.monotonic`; None if it begins now.
    Raises:
        RefusedError: another process uses the folder, or the folder has results of another machine or source. Nothing
            was run.
    """
    ends_s = (time.monotonic() if began_s is None else began_s) + stage.limit_s
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder):
        before = {} if again else _kept(stage.name, folder, machine)
        records = []
        for step in stage.steps:
            if step.name not in before:
                # A result file without a record is from an earlier call. It is removed so that it does not look like a
                # result of this call.
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
    """Returns the records of steps that were begun, by name. If the stage's file cannot be read, prints why and returns
    no records.

    Raises:
        RefusedError: the records are from another machine or from another version of the source, so they must not be
            shown as results of this machine and source.
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
    """Runs the steps that have no result yet, and writes their records to the stage's file."""

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
            # The stage runs no further steps if a process could not be ended, because that process would distort their
            # measurements. The stage also ends if a required step did not pass.
            if record["left"] or (step.required and record["state"] != "passed"):
                break


def fair_limit_s(left_s: float, limits_s: Sequence[float]) -> float:
    """Returns how many seconds the first of the steps with the limits `limits_s` may take: its own limit or, if all
    limits together exceed `left_s`, its proportional share of `left_s`. Time that a step does not use goes to later
    steps.
    """
    return min(limits_s[0], max(SHORTEST_S, left_s * limits_s[0] / sum(limits_s)), left_s)


def _run(step: Step, folder: Path, stage: str, limit_s: float) -> dict[str, Any]:
    log = folder / f"{stage}-{step.name.replace(' ', '-')}.log"
    began_s = time.monotonic()
    with log.open("wb") as output:
        # The child gets its own session, so that the processes that it starts can be ended with it.
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
    """Runs in the child before its program, and makes the kernel end the child when the parent ends, even if the parent
    is killed. Otherwise the child would disturb the next call's measurements.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def _end(child: subprocess.Popen[bytes]) -> bool:
    """Ends the child and all processes of its session. Returns False if the child has not ended, because a process that
    waits inside a driver cannot be killed.
    """
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
    """Within the `with` block, a SIGTERM to this process raises SystemExit, so that the running child is ended, too."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
