"""The test kills helpers repeatedly, at random moments of gets, checks and puts, while another unit loads the same
pages."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flexkv.facts.keys import Keys
from flexkv.remote.base import Store
from flexkv.remote.plane import Moving, RemotePlane
from flexkv.transfer.graph import OpId, OpKind, OpResult, OpStatus
from flexkv.unit import driver as unit_driver
from tests.servers.redis import RedisServer
from tests.soak import soak_rounds
from tests.unit.remote.helper_faults import (
    Plan,
    begin_fetch,
    heals,
    rest_briefly,
    use_faulty_helpers,
    write_all,
)
from tests.unit.remote.remote_unit import BLOCK_TOKENS, RemoteUnit, chain
from tests.unit.remote.test_remote_unit import Spoiler

KILLS = 60
PAGES = 48
PROMPTS = 4
VICTIMS = 3
"""Number of units whose helpers are killed in turn. While one helper restarts, the next one is killed."""
LATEST_S = 0.006
"""The test kills a helper at most this many seconds after an op began. Most of the op's 48 pages are then still in
flight."""


class Killing:
    """A unit `reader`, and units `victims`. The test kills the victims' helpers during their ops.

    Attributes:
        hits: number of kills by the kind of op in flight: `get`, `put` or `check`; `too late` if none was.
        compared: number of pages that were loaded; every byte of them was compared.
    """

    def __init__(self, url: str, folder: Path, patch: pytest.MonkeyPatch, seed: int) -> None:
        self._random = random.Random(seed)
        rest_briefly(patch, longest_s=0.05)
        patch.setattr(unit_driver, "WATCH_EVERY_S", 0.02)
        self.reader = RemoteUnit(url)
        self.plan: Plan = use_faulty_helpers(folder, patch)
        self.victims = [RemoteUnit(url, remote__batch_pages=4) for _ in range(VICTIMS)]
        self.prompts = [chain(f"prompt {number}", PAGES) for number in range(PROMPTS)]
        for prompt in self.prompts:
            write_all(self.reader, prompt)
        self.hits: Counter[str] = Counter()
        self.compared = 0
        self._put: list[Keys] = []

    def kill_many(self) -> None:
        for number in range(KILLS):
            self.kill_once(number)

    def _is_up(self, victim: RemoteUnit) -> bool:
        for other in self.victims:
            other.unit.poll()  # polls every victim, so that the helpers of the others restart meanwhile
        return not victim.tier.down

    def load(self, unit: RemoteUnit, keys: Keys) -> None:
        self.compared += unit.load(keys) // BLOCK_TOKENS

    def kill_once(self, number: int) -> None:
        victim = self.victims[number % VICTIMS]
        victim.poll_until(lambda: self._is_up(victim), "it heals")
        victim.lose_host()
        deed = self._random.choice(("get", "get", "put", "check"))
        prompt = self._random.choice(self.prompts)
        if deed == "check":
            self.plan.set("check", "kill")
        if deed == "put":
            self._put.append(chain(f"put {number}", PAGES))
            victim.store(self._put[-1])
            victim.poll_until(lambda: victim.plane._moving, "the store is written")
        else:
            begin_fetch(victim, prompt, f"flying {number}")
        if deed == "check":
            victim.poll_until(self.plan.reached.exists, "values came")
            self.plan.clear()
        else:
            ends_s = time.monotonic() + self._random.uniform(0.0, LATEST_S)
            while time.monotonic() < ends_s:
                victim.unit.poll()
            os.kill(victim.helper_pid, signal.SIGKILL)
        in_flight = {moving.op.kind for moving in victim.plane._moving.values()}
        wanted = OpKind.DISK_WRITE if deed == "put" else OpKind.DISK_READ
        self.hits[deed if wanted in in_flight else "too late"] += 1
        # While the victim's helper restarts, the reader loads pages. Then the victim does.
        self.reader.lose_host()
        self.load(self.reader, self._random.choice(self.prompts + self._put[-2:]))
        victim.poll_until(lambda: not victim.unit.busy, "what was in flight ends")
        self.load(victim, prompt)

    def check(self) -> None:
        """Asserts that all victims recover. Also asserts that a page has the right bytes if a killed put left it in the
        store."""
        for victim in self.victims:
            heals(victim, self.prompts[0])
        for keys in self._put:
            self.reader.lose_host()
            self.load(self.reader, keys)
        self.reader.check_no_leaks()

    def close(self) -> None:
        for unit in (self.reader, *self.victims):
            unit.close()


@pytest.fixture
def killing(
    redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soak_round: int
) -> Iterator[Killing]:
    made = Killing(redis.url, tmp_path, monkeypatch, soak_round)
    yield made
    made.close()


@pytest.mark.soak
@soak_rounds()
def test_killed_helpers_deliver_no_wrong_byte_and_lose_no_slot(killing: Killing, soak_round: int) -> None:
    killing.kill_many()
    killing.check()
    assert sum(killing.hits.values()) == KILLS
    assert min(killing.hits[deed] for deed in ("get", "put", "check")) >= 5, killing.hits
    assert killing.compared > KILLS * PAGES / 4
    assert sum(victim.plane.totals.restarts for victim in killing.victims) >= KILLS


@pytest.mark.parametrize("soak_round", [0])
def test_control_a_plane_whose_killed_ops_are_good(
    killing: Killing, monkeypatch: pytest.MonkeyPatch, soak_round: int
) -> None:
    """A control: if a killed read counts as successful, a load returns the previous bytes of slots that were never
    filled, and the comparison finds them."""

    def published(self: RemotePlane, moving: Moving, reason: str) -> None:
        del self._moving[moving.op.op_id]
        self._ended.append(OpResult(moving.op.op_id, OpStatus.OK, np.empty(0, np.int32)))

    monkeypatch.setattr(RemotePlane, "_end_cancelled", published)
    with pytest.raises(AssertionError, match="a wrong byte"):
        killing.kill_many()


@pytest.mark.parametrize("soak_round", [0])
def test_control_a_plane_that_loses_an_op(
    killing: Killing, monkeypatch: pytest.MonkeyPatch, soak_round: int
) -> None:
    """A control: if the plane forgets an op of a killed helper, the op's slots are never freed. The check at the end of
    each test finds this."""
    reaped = RemotePlane.reaped

    def loses(self: RemotePlane, how: str) -> None:
        for op_id in list(self._moving):
            del self._moving[OpId(op_id)]
        reaped(self, how)

    monkeypatch.setattr(RemotePlane, "reaped", loses)
    victim = killing.victims[0]
    killing.plan.set("check", "kill")
    begin_fetch(victim, killing.prompts[0])
    victim.poll_until(lambda: victim.tier.down, "the loss is seen")
    killing.plan.clear()
    monkeypatch.setattr("tests.unit.remote.remote_unit.DEADLINE_S", 3.0)
    with pytest.raises(AssertionError):
        victim.poll_until(lambda: not victim.unit.busy, "the tiers come to rest", 3.0)
    index = victim.manager.hub.index
    assert index.free_slots(0) <= index.up_slots(0) - PAGES
    victim.unit._close_s = 0.5


@pytest.mark.parametrize("unchecked", [False, True])
def test_control_a_helper_that_does_not_check(
    redis: RedisServer,
    redis_store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    unchecked: bool,
) -> None:
    keys = chain("prompt", 12)
    use_faulty_helpers(tmp_path, monkeypatch)
    if unchecked:
        monkeypatch.setenv("TEST_REMOTE_UNCHECKED", "yes")
    unit = RemoteUnit(redis.url)
    write_all(unit, keys)
    unit.lose_host()
    spoiler = Spoiler(redis_store, unit)
    value = spoiler.read(keys[5])
    value[100] ^= 1
    spoiler.write(keys[5], value)
    if unchecked:
        with pytest.raises(AssertionError, match="a wrong byte"):
            unit.load(keys)
    else:
        assert unit.load(keys) == 5 * BLOCK_TOKENS
    unit.close()
