"""The names of values in a shared store include the weights, so that units with different weights share no pages."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flexkv.remote.values import ValueOwner
from flexkv.weights import check, digest
from flexkv.weights.files import WeightsContent
from tests.servers.redis import RedisServer
from tests.unit.remote.remote_unit import BLOCK_TOKENS, DEADLINE_S, NAMESPACE, RemoteUnit, chain
from tests.unit.weights.tensor_files import HIDDEN, change, write_model

Build = Callable[..., RemoteUnit]
FILE = "model.safetensors"
KEYS = chain("weights", 6)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(check, "process_start_ns", lambda: time.time_ns() + 3600 * 10**9)
    monkeypatch.setenv("HOME", str(tmp_path))
    return write_model(tmp_path / "model")


@pytest.fixture
def build(redis: RedisServer) -> Iterator[Build]:
    units: list[RemoteUnit] = []

    def make(model: Path) -> RemoteUnit:
        content = WeightsContent((str(model),))
        units.append(RemoteUnit(redis.url, weights=content, disk__compute_if_faster=False))
        return units[-1]

    yield make
    for unit in units:
        unit.close()


def rows(model: Path) -> None:
    change(model / FILE, "model.embed_tokens.weight", 1000 * HIDDEN, 8 * HIDDEN)


def written(unit: RemoteUnit) -> None:
    unit.up()
    assert unit.store(KEYS) == len(KEYS)
    unit.settle()
    assert unit.tier.counts.written == len(KEYS)


def test_another_machine_with_the_same_weights_finds_the_values(
    build: Build, model: Path, tmp_path: Path
) -> None:
    written(build(model))
    assert build(write_model(tmp_path / "copy")).load(KEYS) == len(KEYS) * BLOCK_TOKENS


def test_changed_weights_of_the_same_fingerprint_find_none(build: Build, model: Path) -> None:
    written(build(model))
    rows(model)
    other = build(model)
    assert other.load(KEYS) == 0
    written(other)
    assert build(model).load(KEYS) == len(KEYS) * BLOCK_TOKENS


def test_nothing_is_asked_written_or_removed_before_the_weights_are_named(
    build: Build, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(build(model))
    go, digest_files = threading.Event(), digest.digest_files

    def late(files, stop, done):  # type: ignore[no-untyped-def]
        assert go.wait(DEADLINE_S)
        digest_files(files, stop, done)

    monkeypatch.setattr(check, "digest_files", late)
    monkeypatch.setattr(check, "SOON_BYTES", 0)
    unit = build(model)
    assert unit.load(KEYS) == 0
    more = chain("more", 3)
    unit.store(more)
    unit.manager.forget(0, KEYS[3:])
    unit.settle()
    totals = unit.plane.totals
    assert (totals.lookups.total(), totals.puts.total(), totals.gets.total()) == (0, 0, 0)
    assert unit.load(more) == len(more) * BLOCK_TOKENS, "host memory serves"
    go.set()
    unit.poll_until(lambda: unit.unit.gate.is_open, "the weights are named")
    unit.settle()
    assert totals.puts["ok"] == len(more)
    # The unit dropped pages while it read the weights. It has removed these pages from the store, too.
    monkeypatch.setattr(check, "SOON_BYTES", 1 << 30)
    third = build(model)
    third.up()

    def served() -> int:
        third.lose_host()
        return third.load(KEYS)

    third.poll_until(lambda: served() == 3 * BLOCK_TOKENS, "the removal is carried out")


def test_a_process_of_the_store_that_starts_again_has_the_names(build: Build, model: Path) -> None:
    unit = build(model)
    written(unit)
    os.kill(unit.helper_pid, signal.SIGKILL)
    unit.poll_until(lambda: unit.tier.down, "its end is noticed")
    unit.up()
    unit.lose_host()
    assert unit.load(KEYS) == len(KEYS) * BLOCK_TOKENS


def test_owners_of_other_weights_have_other_names() -> None:
    owners = [
        ValueOwner(NAMESPACE),
        ValueOwner(NAMESPACE, weights=b"a" * 32),
        ValueOwner(NAMESPACE, weights=b"b" * 32),
    ]
    assert len({owner.digest("a format") for owner in owners}) == 3
