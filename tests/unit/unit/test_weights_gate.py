"""From disks and other tiers behind host memory, a unit serves only pages that were computed with its own weights."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flexkv.config import load_config
from flexkv.facts.ranks import KvGroup, UnitOwner
from flexkv.observe import Counters
from flexkv.storage import weights_name
from flexkv.storage.journal import Journal
from flexkv.storage.striped_slabs import StripedSlabs
from flexkv.storage.weights_name import WEIGHTS_NAME
from flexkv.unit import weights_gate
from flexkv.unit.base import CacheRole
from flexkv.unit.build import build_unit
from flexkv.unit.live_unit import LiveUnit
from flexkv.weights import check, digest
from flexkv.weights.files import NAMED, WeightsContent
from flexkv.weights.fingerprint import sampled_identity
from flexkv.weights.table import WeightsTable
from tests.unit.unit.test_units import DEADLINE_S, KEYS, facts, hit, store, stored
from tests.unit.weights.tensor_files import HIDDEN, change, write_model

Build = Callable[..., LiveUnit]
FILE = "model.safetensors"
LATER_NS = 3600 * 10**9


@pytest.fixture(autouse=True)
def _patient_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a unit's start wait long enough for small weights to be read, even on a busy machine."""
    monkeypatch.setattr(weights_gate, "START_WAIT_S", DEADLINE_S)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a model. Its files are older than the engine's process."""
    monkeypatch.setattr(check, "process_start_ns", lambda: time.time_ns() + LATER_NS)
    return write_model(tmp_path / "model")


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    units: list[LiveUnit] = []

    def make(content: WeightsContent | Path = NAMED, **settings: object) -> LiveUnit:
        """Closes the previous unit and makes a unit with these weights. The fingerprint of the model is always the
        same, even if a test changes the weights.
        """
        while units:
            finish(units.pop())
        if isinstance(content, Path):
            content = WeightsContent((str(content),))
        small = {
            "host.bytes": 1 << 20,
            "host.huge_pages": "off",
            "disk.folders": str(tmp_path / "disk"),
            "disk.bytes_per_folder": "1MiB",
            "disk.compute_if_faster": False,
        }
        config = load_config(small | {key.replace("__", "."): value for key, value in settings.items()}, {})
        owner = UnitOwner("a model", b"n" * 32, "unit0", content)
        unit = build_unit(config, [KvGroup(4)], {0: facts()}, owner, CacheRole(recomputes=True))
        unit.grow()
        units.append(unit)
        return unit

    yield make
    while units:
        finish(units.pop())


def finish(unit: LiveUnit) -> None:
    unit.close()
    unit.manager.check_integrity()


def settle(unit: LiveUnit) -> None:
    poll_until(unit, lambda: not unit.busy)


def poll_until(unit: LiveUnit, done: Callable[[], object]) -> None:
    ends_s = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < ends_s
        unit.poll()
        time.sleep(0.002)


def on_disk(unit: LiveUnit) -> int:
    """Returns the number of pages of KEYS that the disk tier would serve: all of them, or 0 if the tier is not in use
    or if it lacks a page."""
    return len(KEYS) if unit.manager.tiers[1].in_use and unit.manager.present(0, KEYS).all() else 0


def asked(unit: LiveUnit) -> int:
    """Looks up a request until its fetches are finished. Returns the number of blocks that the unit promises, from any
    tier."""
    name = f"request {time.monotonic_ns()}"
    ends_s = time.monotonic() + DEADLINE_S
    while (result := unit.manager.match(name, [KEYS], 0)).reads or unit.manager.waits(name):
        assert time.monotonic() < ends_s
        unit.poll()
        time.sleep(0.001)
    unit.manager.release(name)
    return result.blocks


def written(unit: LiveUnit) -> LiveUnit:
    stored(unit)
    settle(unit)
    assert unit.manager.tiers[1].counts.written == len(KEYS)
    return unit


def rows(model: Path) -> None:
    change(model / FILE, "model.embed_tokens.weight", 1000 * HIDDEN, 8 * HIDDEN)


def matrix(model: Path) -> None:
    change(model / FILE, "model.layers.0.mlp.up_proj.weight", 700_000)


EDITS = pytest.mark.parametrize("edit", [rows, matrix])


def test_the_same_weights_find_their_pages_again(build: Build, model: Path) -> None:
    written(build(model))
    assert asked(build(model)) == len(KEYS)


@EDITS
def test_changed_weights_of_the_same_fingerprint_find_none(
    build: Build, model: Path, edit: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    written(build(model))
    before = sampled_identity(model)
    edit(model)
    assert sampled_identity(model) == before
    unit = build(model)
    assert asked(unit) == 0
    assert [r.message for r in caplog.records if "the disk tier had 3 pages" in r.message]
    # Pages that the unit computes with the new weights are found after a restart.
    written(unit)
    assert asked(build(model)) == len(KEYS)


@EDITS
def test_control_without_a_digest_pages_of_other_weights_are_served(
    build: Build, model: Path, edit: Callable[[Path], None]
) -> None:
    written(build())
    edit(model)
    assert asked(build()) == len(KEYS)


def test_weights_that_come_back_do_not_find_what_others_left(build: Build, model: Path) -> None:
    original = (model / FILE).read_bytes()
    written(build(model))
    rows(model)
    written(build(model))
    (model / FILE).write_bytes(original)
    assert asked(build(model)) == 0


@pytest.mark.parametrize("content", [None, b"", b"0" * 64 + b" 0 0000000000000000\n"])
def test_pages_of_nobody_knows_which_weights_are_not_served(
    build: Build, model: Path, tmp_path: Path, content: bytes | None
) -> None:
    written(build(model)).close()
    (name,) = tmp_path.glob(f"disk/*/*/{WEIGHTS_NAME}")
    if content is None:
        name.unlink()
    else:
        name.write_bytes(content)
    assert asked(build(model)) == 0


def test_a_crash_before_the_name_gives_no_page_to_the_weights_before(
    build: Build, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A crash before a unit has written its weights' name does not give its pages to the previous weights. The slabs
    were deleted, so the folder had no pages when the unit with the new weights started. That unit wrote pages, but
    crashed before it wrote its weights' name. The folder still had the name of the previous weights.
    """
    original = (model / FILE).read_bytes()
    finish(written(build(model)))
    for pattern in ("*.slab", "*.header", "index.sqlite*"):
        for file in tmp_path.glob(f"disk/*/*/{pattern}"):
            file.unlink()
    rows(model)
    with monkeypatch.context() as patch:
        patch.setattr(weights_name, "_write_all", lambda *_: None)
        finish(written(build(model)))
    (model / FILE).write_bytes(original)
    assert asked(build(model)) == 0


def test_a_disk_that_joins_costs_the_others_no_page(build: Build, model: Path, tmp_path: Path) -> None:
    """A new folder without pages does not make a unit drop the pages in its other folders. The new folder comes last in
    the setting, because slots are striped over the folders in their order."""
    written(build(model))
    unit = build(model, disk__folders=[str(tmp_path / "disk"), str(tmp_path / "new")])
    assert unit.gate.is_open
    assert not unit.manager.tiers[1].pages.strange_disks(unit.gate._check.digest)  # type: ignore[attr-defined, union-attr]
    assert unit.manager.tiers[1].epoch == 0  # type: ignore[attr-defined]


class LateDigest:
    """Delays the computation of the weights' digest until the test calls `let_go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._go, self._digest_files = threading.Event(), digest.digest_files
        monkeypatch.setattr(check, "digest_files", self)
        monkeypatch.setattr(check, "SOON_BYTES", 0)
        # On a slow machine, the files may be old enough for the table to keep their digests. Then the digests would not
        # be computed, and nothing would be delayed. So in this test the table knows no digests.
        monkeypatch.setattr(WeightsTable, "known", lambda *_: {})
        self._monkeypatch = monkeypatch
        self.failure: Exception | None = None

    def __call__(self, files, stop, done) -> None:  # type: ignore[no-untyped-def]
        assert self._go.wait(DEADLINE_S)
        if self.failure is not None:
            raise self.failure
        self._digest_files(files, stop, done)

    def let_go(self, unit: LiveUnit, failure: Exception | None = None) -> None:
        self.failure = failure
        self._go.set()
        poll_until(unit, lambda: unit.gate._is_settled)
        self._monkeypatch.setattr(check, "SOON_BYTES", 1 << 30)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateDigest:
    return LateDigest(monkeypatch)


def gauge(unit: LiveUnit) -> float:
    counters = Counters()
    unit.count(counters)
    value: float = counters.data["flexkv_weights_known"][""]
    return value


def test_until_the_weights_are_named_host_memory_serves_alone(
    build: Build, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(build(model))
    rows(model)
    late = LateDigest(monkeypatch)
    unit = build(model)
    assert (asked(unit), on_disk(unit), gauge(unit)) == (0, 0, 0)
    stored(unit)
    assert asked(unit) == len(KEYS)
    for _ in range(10):
        unit.poll()
    assert unit.manager.tiers[1].counts.written == 0
    assert not unit.busy
    late.let_go(unit)
    assert gauge(unit) == 1
    settle(unit)
    assert unit.manager.tiers[1].counts.written == len(KEYS), "what was stored meanwhile is kept"
    assert asked(build(model)) == len(KEYS)


def test_pages_of_the_same_weights_are_served_from_then_on(
    build: Build, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written(build(model)).close()
    (tmp_path / "disk" / "weights.json").unlink(missing_ok=True)
    late = LateDigest(monkeypatch)
    unit = build(model)
    assert asked(unit) == 0
    late.let_go(unit)
    assert asked(unit) == len(KEYS)


def test_an_end_before_the_name_loses_what_was_stored_and_says_so(
    build: Build, model: Path, late: LateDigest, caplog: pytest.LogCaptureFixture
) -> None:
    unit = stored(build(model))
    assert not unit.close()
    assert unit.manager.tiers[1].counts.lost == len(KEYS)
    assert (
        "3 pages of host memory are not kept in the disk tier: the end came while the engine's" in caplog.text
    )
    assert "were not written within" not in caplog.text


@pytest.mark.parametrize("waiting_pages", [0, len(KEYS)])
def test_what_found_no_room_to_wait_is_kept_as_well(
    build: Build, model: Path, late: LateDigest, waiting_pages: int
) -> None:
    unit = build(model, store__inflight_pages=1 << 20)
    tier = unit.manager.tiers[1]
    tier.facts = replace(tier.facts, waiting_pages=waiting_pages)
    stored(unit)
    late.let_go(unit)
    settle(unit)
    counts = unit.manager.tiers[1].counts
    assert (counts.written, counts.dropped_writes) == (len(KEYS), 0)


def test_what_found_no_room_and_left_host_memory_counts_as_dropped(
    build: Build, model: Path, late: LateDigest
) -> None:
    unit = build(model)
    tier = unit.manager.tiers[1]
    tier.facts = replace(tier.facts, waiting_pages=0)
    stored(unit)
    index = unit.manager.hub.presence
    index.remove(index.find(0, KEYS))
    late.let_go(unit)
    settle(unit)
    counts = unit.manager.tiers[1].counts
    assert (counts.written, counts.dropped_writes) == (0, len(KEYS))


def test_weights_that_cannot_be_named_leave_host_memory(
    build: Build, model: Path, late: LateDigest, caplog: pytest.LogCaptureFixture
) -> None:
    unit = stored(build(model))
    late.let_go(unit, MemoryError("no memory to read"))
    assert asked(unit) == len(KEYS)
    assert gauge(unit) == 0
    assert not unit.busy
    told = [r.message for r in caplog.records if r.levelno >= logging.ERROR and "nothing names" in r.message]
    assert told == [
        "the disk tier is off: nothing names the engine's weights: MemoryError: no memory to read"
    ]
    assert unit.manager.tiers[1].counts.down_writes == len(KEYS)


def test_a_file_that_changed_after_the_start_leaves_host_memory(
    build: Build, model: Path, tmp_path: Path
) -> None:
    written(build(model)).close()
    (tmp_path / "model" / "late.bin").write_bytes(b"x")
    patched = pytest.MonkeyPatch()
    with patched.context() as patch:
        patch.setattr(check, "process_start_ns", lambda: 0)
        unit = build(model)
    assert asked(unit) == 0
    assert "changed after the engine's start" in unit.manager.tiers[1].down
    assert hit(stored(unit)) == len(KEYS)


def test_a_tier_that_cannot_open_goes_down_alone(
    build: Build, model: Path, late: LateDigest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a tier cannot start the thread that writes its weights' name, only this tier goes down, and the engine's step
    does not fail. The disk tier starts this thread when the weights are known."""
    unit = stored(build(model))

    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(unit.manager.tiers[1].volumes, "name_weights", refused)  # type: ignore[attr-defined]
    late.let_go(unit)
    assert "can't start new thread" in unit.manager.tiers[1].down
    assert asked(unit) == len(KEYS)
    assert not unit.busy


def test_a_disk_that_hangs_while_it_forgets_holds_up_no_step(
    build: Build, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(build(model))
    rows(model)
    late = LateDigest(monkeypatch)
    unit = stored(build(model))
    # The disk's journal accepts records and never writes them, as if the disk hung.
    monkeypatch.setattr(Journal, "put", lambda *_: True)
    waits: list[float] = []
    finish_reset = StripedSlabs.finish_reset

    def waiting(slabs: StripedSlabs, deadline_s: float) -> None:
        waits.append(deadline_s)
        finish_reset(slabs, deadline_s)

    monkeypatch.setattr(StripedSlabs, "finish_reset", waiting)
    late._go.set()
    poll_until(unit, lambda: unit.gate._open_by_s)
    assert not unit.poll()
    assert asked(unit) == len(KEYS), "host memory serves meanwhile"
    assert unit.manager.tiers[1].held
    unit.gate._open_by_s = time.monotonic()
    poll_until(unit, lambda: unit.gate._is_settled)
    assert waits == [0.0]
    for _ in range(3):
        unit.manager.tiers[1].poll(0.0)
    assert "no disk is left" in unit.manager.tiers[1].down


def test_weights_without_a_name_leave_host_memory(build: Build) -> None:
    written(build())
    unit = build(WeightsContent(unnamed="a branch may move"))
    assert asked(unit) == 0
    assert "a branch may move" in unit.manager.tiers[1].down


def test_a_reset_before_the_name_keeps_all_pages_out(
    build: Build, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the engine's weights were reset before the files' digest was known, no page is kept under the digest's name.
    The running engine has new weights, but the files still have the old ones.
    """
    written(build(model))
    late = LateDigest(monkeypatch)
    unit = build(model, disk__bytes_per_folder="1MiB")
    if unit.gate.is_open:
        pytest.fail("the digest was not late")
    unit.manager.reset()
    late.let_go(unit)
    assert asked(unit) == 0
    assert store(unit) is not None


def test_named_weights_are_not_read(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check.WeightsCheck, "start", lambda *_: pytest.fail("nothing is to be read"))
    unit = written(build())
    assert gauge(unit) == 1


def test_without_tiers_nothing_is_read(build: Build, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check.WeightsCheck, "start", lambda *_: pytest.fail("nothing is to be read"))
    assert build(model, disk__folders="").gate.is_open
