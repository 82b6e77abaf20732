"""Runs test files repeatedly while busy loops load the machine, and stops at the first failure.

`python -m tests.steady [--budget-s S] [--load N] [--rounds N] [FILE or FOLDER ...]` runs the given test files, or all
if none is given; `make steady` calls it. A file that uses threads, clocks or processes runs 20 times, and 5 more times
under ThreadSanitizer if it is one of the tests that run there. Any other file runs 3 times. Passed rounds are recorded
in build/steady.json until a file of the tree changes, so that the next call continues where this one stopped. The exit
code is 0 if every round has passed, 1 after a failure, and 3 if the time is over.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from build_support.console import fail, say
from build_support.ninja_file import ROOT, Variant
from build_support.variant_package import make_tree, sanitizer_environment
from tests.sanitizers.run import FOLDERS

STATE = ROOT / "build" / "steady.json"

TIMED_ROUNDS = 20
THREAD_SANITIZER_ROUNDS = 5
OTHER_ROUNDS = 3

BUDGET_S = 3600.0
ROUND_S = 1800.0
"""Seconds after which a round is stopped and counts as failed."""
SHOWN_BYTES = 8000
"""Number of bytes shown from the end of a failed round's output."""

TIMED_MODULES = frozenset(
    [
        "asyncio",
        "concurrent",
        "fcntl",
        "multiprocessing",
        "queue",
        "select",
        "signal",
        "socket",
        "subprocess",
        "threading",
        "time",
    ]
)
"""Modules of the standard library. The load of other processes can disturb a test that imports one of them."""

STILL_TO_RUN = 3

BUSY_LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"


@dataclass(frozen=True)
class Plan:
    """How many times a test file runs: without a sanitizer, and under ThreadSanitizer."""

    path: str
    usual: int
    under_thread_sanitizer: int

    def rounds(self, most: int) -> Iterator[tuple[str, bool]]:
        """Yields the name of each round, and whether it runs under ThreadSanitizer. Yields at most `most` rounds with
        it, and at most `most` without it.
        """
        for number in range(min(self.usual, most)):
            yield f"{self.path} {number + 1}/{self.usual}", False
        for number in range(min(self.under_thread_sanitizer, most)):
            yield f"{self.path} {number + 1}/{self.under_thread_sanitizer} under ThreadSanitizer", True


def imported_modules(path: Path) -> set[str]:
    """Returns the dotted names of the modules that a Python file imports, and of the names that it imports from
    modules."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def is_timed(path: Path, root: Path = ROOT) -> bool:
    """Whether a test file, or a module of `tests` that it imports, uses threads, clocks or processes."""
    seen: set[Path] = set()
    waiting = [path]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        for name in imported_modules(current):
            if name.split(".")[0] in TIMED_MODULES:
                return True
            module = root.joinpath(*name.split(".")).with_suffix(".py")
            if name.startswith("tests.") and module.exists():
                waiting.append(module)
    return False


def plan(path: Path) -> Plan:
    """Returns how many times the test file `path` runs. The file must be in a folder below ROOT."""
    name = path.relative_to(ROOT).as_posix()
    timed = is_timed(path)
    sanitized = timed and any(Path(name).is_relative_to(folder) for folder in FOLDERS["thread"])
    return Plan(name, TIMED_ROUNDS if timed else OTHER_ROUNDS, THREAD_SANITIZER_ROUNDS if sanitized else 0)


def tree_digest() -> str:
    """Returns a digest that changes with the name or content of any file of the tree that git tracks or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    digest = hashlib.sha256()
    for name in sorted(filter(None, listed.stdout.split(b"\0"))):
        path = ROOT / os.fsdecode(name)
        digest.update(name + b"\0" + (path.read_bytes() if path.is_file() else b"") + b"\0")
    return digest.hexdigest()


class Progress:
    """The rounds that have passed with exactly the files of this tree. They are saved in a file."""

    def __init__(self, path: Path, tree: str) -> None:
        self._path = path
        self._tree = tree
        self._passed: set[str] = set()
        if path.exists():
            kept = json.loads(path.read_text())
            if kept["tree"] == tree:
                self._passed = set(kept["passed"])

    def __contains__(self, name: str) -> bool:
        return name in self._passed

    def add(self, name: str) -> None:
        """Records that the round has passed, and saves the file."""
        self._passed.add(name)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({"tree": self._tree, "passed": sorted(self._passed)}, indent=1))
        new.replace(self._path)


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Runs `count` processes that only compute, until the context ends."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY_LOOP]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_round(path: str, cwd: Path, environ: dict[str, str]) -> str | None:
    """Runs the file's tests once. Returns None if they have passed, and otherwise the last part of pytest's output."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", path]
    try:
        done = subprocess.run(
            command, cwd=cwd, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=ROUND_S
        )
    except subprocess.TimeoutExpired as late:
        return f"did not end within {ROUND_S:.0f} s\n" + (late.stdout or b"")[-SHOWN_BYTES:].decode(
            errors="replace"
        )
    return None if done.returncode == 0 else done.stdout[-SHOWN_BYTES:].decode(errors="replace")


def run(plans: Sequence[Plan], progress: Progress, budget_s: float, most_rounds: int = TIMED_ROUNDS) -> int:
    """Runs the rounds that have not passed yet, file by file. Begins no round after `budget_s` seconds. Returns the
    program's exit code.
    """
    ends_s = time.monotonic() + budget_s
    waiting = [
        (each, name, sanitized)
        for each in plans
        for name, sanitized in each.rounds(most_rounds)
        if name not in progress
    ]
    sanitized_tree: Path | None = None
    for number, (each, name, sanitized) in enumerate(waiting):
        if time.monotonic() >= ends_s:
            say(f"{len(waiting) - number} of {len(waiting)} rounds are still to run: call this again")
            return STILL_TO_RUN
        if sanitized and sanitized_tree is None:
            sanitized_tree = make_tree(Variant(None, "thread"))
        began_s = time.monotonic()
        output = run_round(
            each.path,
            sanitized_tree if sanitized and sanitized_tree else ROOT,
            sanitizer_environment("thread") if sanitized else dict(os.environ),
        )
        if output is not None:
            print(output, flush=True)
            say(f"wavers or fails: {name}")
            return 1
        progress.add(name)
        say(f"passed: {name}, {time.monotonic() - began_s:.0f} s")
    say(f"steady: {len(plans)} files")
    return 0


def find_files(named: Sequence[str]) -> list[Path]:
    """Returns the given test files and the test files in the given folders, or all test files if nothing is given. Ends
    the program if an argument is neither a test file nor a folder with test files.
    """
    files: list[Path] = []
    for path in [Path(name).resolve() for name in named] or [ROOT / "tests"]:
        found = sorted(path.rglob("test_*.py")) if path.is_dir() else [path] if path.is_file() else []
        if not (found and path.is_relative_to(ROOT / "tests") and found[0].name.startswith("test_")):
            fail(f"{path}: expected a file tests/**/test_*.py, or a folder of such")
        files += found
    return list(dict.fromkeys(files))


def main() -> None:
    parser = ArgumentParser(
        description="Repeats test files beside busy loops; stops at the first that wavers."
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="or folder")
    parser.add_argument(
        "--budget-s", type=float, default=BUDGET_S, help="begin no round after so many seconds"
    )
    parser.add_argument(
        "--load", type=int, default=2 * len(os.sched_getaffinity(0)), help="number of busy loops"
    )
    parser.add_argument(
        "--rounds", type=int, default=TIMED_ROUNDS, help="run a file no more often, for a first look"
    )
    asked = parser.parse_args()
    plans = [plan(path) for path in find_files(asked.files)]
    with busy_loops(asked.load):
        code = run(plans, Progress(STATE, tree_digest()), asked.budget_s, asked.rounds)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
