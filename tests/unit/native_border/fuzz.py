"""Runs the fuzzer's cases in child processes and, if one dies, finds the calls that caused it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from tests.own_tree import OWN_TREE
from tests.unit.native_border.cases import AT_ONCE, MOST_CALLS

CHILD_S = 600.0
CASE_S = 90.0
"""Seconds after which a case counts as hung."""

SHOWN_CHARACTERS = 4000


@dataclass
class Counts:
    """For each function, the number of calls that returned and the number that raised an allowed error."""

    returned: Counter[str] = field(default_factory=Counter)
    raised: Counter[str] = field(default_factory=Counter)

    def add(self, said: dict[str, dict[str, int]]) -> None:
        self.returned.update(said["returned"])
        self.raised.update(said["raised"])


@dataclass(frozen=True)
class Ended:
    """The end of a child process.

    Attributes:
        why: what is wrong with the end; empty if nothing is wrong.
        last: the last line of the child's log, which shows the child's last call.
    """

    why: str
    last: str
    output: str

    @property
    def case(self) -> int:
        return int(self.last.split()[1])

    @property
    def call(self) -> int | None:
        words = self.last.split()
        return int(words[3].rstrip(":")) if words[2:3] == ["call"] else None


class CrashError(AssertionError):
    """Raised if a call ended the process, or ended in a way that is not allowed. The message names seed, case and
    call.
    """


def fuzz(
    seed: int,
    first: int,
    end: int,
    module: str = "flexkv.c_ext",
    case_s: float = CASE_S,
    at_once: float = AT_ONCE,
) -> Counts:
    """Runs the cases from `first` to `end` (exclusive) of a seed in a child process.

    Args:
        at_once: share of the calls that run at the same time as another call in a second thread.

    Raises:
        CrashError: a case went wrong.
    """
    counts = Counts()
    run = partial(run_child, module, str(seed), case_s=case_s, at_once=at_once)
    ended = run(first, end)
    if ended.why:
        raise CrashError(f"{module}, seed {seed}: {_report(run, first, ended)}")
    counts.add(json.loads(ended.output.splitlines()[-1]))
    return counts


class Run(Protocol):
    """A function that runs the cases from `first` to `end` (exclusive) of a module and a seed. Each case makes the
    given `calls`, or all of its calls if none are given.
    """

    def __call__(self, first: int, end: int, calls: tuple[int, ...] = ()) -> Ended: ...


def run_child(
    module: str,
    seed: str,
    first: int,
    end: int,
    calls: tuple[int, ...] = (),
    case_s: float = CASE_S,
    at_once: float = AT_ONCE,
) -> Ended:
    with tempfile.TemporaryDirectory(prefix="native-border-") as folder:
        work = Path(folder, "work")
        work.mkdir()
        log = Path(folder, "log")
        bounded = {
            name: f"{os.environ.get(name, '')}:allocator_may_return_null=1:max_allocation_size_mb=1024"
            for name in ("ASAN_OPTIONS", "TSAN_OPTIONS")
        }
        command = [sys.executable, "-m", "tests.unit.native_border.fuzz_child", module, seed]
        command += [str(first), str(end), str(work), str(log), str(case_s), str(at_once), *map(str, calls)]
        try:
            done = subprocess.run(
                command,
                cwd=OWN_TREE,
                env={**os.environ, **bounded},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=CHILD_S,
            )
        except subprocess.TimeoutExpired as error:
            output = (error.stdout or b"").decode(errors="replace")
            return Ended(f"did not end within {CHILD_S} s", _last_line(log), output)
        return Ended(_why(done.returncode), _last_line(log), done.stdout)


def _why(code: int) -> str:
    if code < 0:
        return f"died by {signal.Signals(-code).name}"
    return f"ended with code {code}" if code else ""


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="ascii").splitlines() if log.exists() else []
    return lines[-1] if lines else "before its first call"


def _report(run: Run, first: int, ended: Ended) -> str:
    """Runs the failed case again with fewer calls, and reports the smallest set of calls found with which it still
    fails. If the case does not fail when it runs alone, reports the latest case with which the child must begin so that
    the failed case fails.
    """
    text = [f"a child {ended.why}", f"at {ended.last}"]
    if ended.last.startswith("case "):
        calls = _fewest_calls(run, ended)
        if calls:
            again = run(ended.case, ended.case + 1, calls)
            text.append(
                f"case {ended.case} alone does it, with its calls {list(calls)}: {again.why}, at {again.last}"
            )
        else:
            text.append(f"it takes cases {_latest_start(run, first, ended.case)} to {ended.case}")
    said = ended.output  # a sanitizer reports a fault before Python does
    return "\n".join([*text, said[:SHOWN_CHARACTERS], said[SHOWN_CHARACTERS:][-SHOWN_CHARACTERS:]])


def _fewest_calls(run: Run, ended: Ended) -> tuple[int, ...]:
    """Runs the failed case again with fewer and fewer calls. Returns the smallest set of calls found with which the
    case still fails. Returns an empty set if the case does not fail when it runs alone.
    """

    def is_wrong(chosen: tuple[int, ...]) -> bool:
        return bool(run(ended.case, ended.case + 1, chosen).why)

    last = ended.call
    calls = tuple(range(MOST_CALLS if last is None else last + 1))
    if last is not None and is_wrong((last,)):
        return (last,)
    if not is_wrong(calls):
        return ()
    for call in calls:
        fewer = tuple(other for other in calls if other != call)
        if fewer and is_wrong(fewer):
            calls = fewer
    return calls


def _latest_start(run: Run, first: int, case: int) -> int:
    """Returns the highest number of a case from which a child can start so that `case` still fails."""
    low, high = first, case
    while low < high:
        middle = (low + high + 1) // 2
        if run(middle, case + 1).why:
            low = middle
        else:
            high = middle - 1
    return low
