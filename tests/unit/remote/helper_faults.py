"""Makes a unit's helper fail at moments that a test chooses, and checks that the unit recovers."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flexkv.cache.tiers.remote import tier
from flexkv.facts.keys import Keys
from flexkv.remote import breaker, process
from tests.unit.remote.faulty_helper import PLAN_VARIABLE, REACHED
from tests.unit.remote.remote_unit import BLOCK_TOKENS, DEADLINE_S, RemoteUnit

REAL, FAULTY = "flexkv.remote.helper", "tests.unit.remote.faulty_helper"
SLACK_S = 20.0
"""Seconds by which a load may exceed its time limit in these tests, because a busy machine is slow."""


class Plan:
    """Writes the plan for all faulty helpers into its file (see `faulty_helper.py`).

    Attributes:
        reached: path of the file that a helper makes when it executes the plan.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.reached = Path(f"{path}{REACHED}")

    def set(self, moment: str, deed: str) -> None:
        self.reached.unlink(missing_ok=True)
        made = self._path.with_suffix(".new")
        made.write_text(f"{moment} {deed}")
        made.rename(self._path)

    def clear(self) -> None:
        self._path.unlink(missing_ok=True)


def use_faulty_helpers(folder: Path, patch: pytest.MonkeyPatch) -> Plan:
    path = folder / "plan"
    patch.setenv(PLAN_VARIABLE, str(path))

    def popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen([FAULTY if word == REAL else word for word in command], **options)

    stand_in = SimpleNamespace(
        Popen=popen, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
    patch.setattr(process, "subprocess", stand_in)
    return Plan(path)


def rest_briefly(patch: pytest.MonkeyPatch, longest_s: float = 0.4) -> None:
    """Shortens the pauses before a failed store is tried again, for all units in this process. Tests kill helpers far
    more often than real helpers fail, and cannot wait for the usual pauses.
    """
    patch.setattr(breaker, "FIRST_REST_S", 0.05)
    patch.setattr(breaker, "LONGEST_REST_S", longest_s)
    patch.setattr(tier, "LIAR_S", 0.3)
    patch.setattr(tier, "ABSENT_S", 0.3)


def state_of(pid: int) -> str:
    """Returns the process's state as ps prints it: R, S, T (stopped) or Z (finished, but not reaped). Returns an empty
    string if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def wait_for(done: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    ends_s = time.monotonic() + deadline_s
    while not done():
        assert time.monotonic() < ends_s, f"not within {deadline_s:.0f} s: {what}"
        time.sleep(0.005)


def children() -> set[int]:
    found: set[int] = set()
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        found |= set(map(int, (task / "children").read_text().split()))
    return found


def leased(unit: RemoteUnit) -> int:
    """Evicts all evictable pages from host memory. Returns the number of slots that are still in use, because they are
    leased."""
    unit.lose_host()
    index = unit.manager.hub.index
    return int(index.up_slots(0) - index.free_slots(0))


def begin_fetch(unit: RemoteUnit, keys: Keys, request_id: str = "in flight") -> None:
    """Starts a fetch of `keys`, and returns when its reads are in flight. Before it returns, it ends the request, so
    that only the reads in flight keep the pages' slots leased.
    """

    def moves() -> bool:
        unit.manager.match(request_id, [keys], 0)
        unit.unit.poll()
        return bool(unit.plane._moving)

    unit.poll_until(moves, "the store is read")
    unit.manager.end_request(request_id)


def load_in_time(unit: RemoteUnit, keys: Keys) -> int:
    """Loads the pages of `keys` and compares every byte. Asserts that the load took no longer than a request may wait
    for the store. Returns the number of tokens loaded.
    """
    begun_s = time.monotonic()
    tokens = unit.load(keys)
    facts = unit.tier.facts
    assert time.monotonic() - begun_s < facts.wait_s + unit.tier.probe_s + SLACK_S
    return tokens


def heals(unit: RemoteUnit, keys: Keys) -> None:
    """Waits until the remote tier is up and serves all of `keys`, then asserts that no host slot has been lost."""
    unit.up()

    def served() -> bool:
        unit.lose_host()
        return load_in_time(unit, keys) == len(keys) * BLOCK_TOKENS

    unit.poll_until(served, "the store serves again")
    unit.check_no_leaks()


def write_all(unit: RemoteUnit, keys: Keys) -> None:
    """Computes and stores the pages of `keys` repeatedly, as an engine does, until the store has all of them."""
    unit.up()

    def written() -> bool:
        unit.lose_host()
        unit.store(keys)
        unit.settle()
        return bool(unit.tier.known(0, keys).all())

    unit.poll_until(written, "the store takes it")
