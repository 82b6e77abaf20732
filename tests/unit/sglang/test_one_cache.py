"""Several engines share one folder. A page stored from one engine's pool arrives in another pool's order, or is a miss
with a named reason.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flexkv.storage.peer_reader import PeerReader
from flexkv.weights import check
from flexkv.weights.files import NAMED, WeightsContent
from tests.unit.sglang.conftest import hashes_of
from tests.unit.sglang.sharing_pools import HEADS, LAYERS, POOLS, TOKENS, Engine, EnginePool, sglang, trtllm
from tests.unit.weights.tensor_files import HIDDEN, change, write_model

PAGES = hashes_of("first", "second")
FROM, TO = [2, 5], [7, 3]

Start = Callable[..., Engine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    engines: list[Engine] = []

    def begin(pool: EnginePool, unit: str = "one", disk: Path | None = None, **settings: Any) -> Engine:
        engines.append(Engine(pool, disk or tmp_path / "disk", unit, **settings))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.cache.close()


@pytest.mark.parametrize("source", POOLS)
def test_every_number_arrives_at_its_layer_token_and_head(start: Start, tmp_path: Path, source: str) -> None:
    one = start(POOLS[source]())
    one.store(PAGES, FROM)
    expected = [one.pool.numbers(block).clone() for block in FROM]
    one.close()
    for number, target in enumerate(POOLS):
        disk = tmp_path / target
        shutil.copytree(tmp_path / "disk", disk)
        # With `host.verify`, the load checks the digests that were computed when the page was converted.
        other = start(POOLS[target](), "other", disk, host__verify=bool(number % 2))
        others = {block: other.pool.numbers(block).clone() for block in range(1, 10) if block not in TO}
        assert other.find(PAGES) == 2, target
        assert other.load(PAGES, TO), target
        for block, numbers in zip(TO, expected, strict=True):
            found = other.pool.numbers(block)
            for layer in range(LAYERS):
                for kv in range(2):
                    for token in range(TOKENS):
                        for head in range(HEADS):
                            place = (layer, kv, token, head)
                            assert torch.equal(found[place], numbers[place]), (target, *place)
        for block, numbers in others.items():
            assert torch.equal(other.pool.numbers(block), numbers), (target, block)
        other.close()


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("named", [True, False], ids=["all content", "control: the fingerprint"])
def test_another_engines_pages_are_served_to_the_weights_that_they_are_of(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: bool, named: bool
) -> None:
    monkeypatch.setattr(check, "process_start_ns", lambda: time.time_ns() + 10**12)
    model = write_model(tmp_path / "model")
    content = WeightsContent((str(model),)) if named else NAMED
    one = start(sglang(), weights=content)
    one.store(PAGES, FROM)
    one.close()
    if changed:
        change(model / "model.safetensors", "model.embed_tokens.weight", 1000 * HIDDEN)
    assert start(trtllm(), "other", weights=content).find(PAGES) == (0 if changed and named else 2)


def test_pages_of_nobody_knows_which_weights_are_not_anothers(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "process_start_ns", lambda: time.time_ns() + 10**12)
    content = WeightsContent((str(write_model(tmp_path / "model")),))
    one = start(sglang())
    one.store(PAGES, FROM)
    one.close()
    assert start(trtllm(), "other", weights=content).find(PAGES) == 0


def test_what_came_from_another_engine_is_kept_in_the_own_order(start: Start, tmp_path: Path) -> None:
    one = start(sglang())
    one.store(PAGES, FROM)
    one.close()
    theirs = next((tmp_path / "disk").rglob("*.slab")).parent.parent
    other = start(trtllm(), "other")
    assert other.find(PAGES) == 2
    assert other.load(PAGES, TO)
    expected = other.pool.numbers(7).clone()
    other.close()
    shutil.rmtree(theirs)
    again = start(trtllm(), "other")
    assert again.find(PAGES) == 2
    assert again.load(PAGES, FROM)
    assert torch.equal(again.pool.numbers(2), expected)


def test_engines_with_keys_of_their_own_do_not_look(start: Start) -> None:
    one = start(sglang())
    one.store(PAGES, FROM)
    one.close()
    assert start(trtllm(), "other", keys__scheme="engine").find(PAGES) == 0


@pytest.mark.parametrize(
    ("pool", "settings", "said"),
    [
        (lambda: sglang(torch.float16), {}, "the elements are float32 and float16"),
        (lambda: sglang(tokens=8), {}, "its blocks have 4 tokens, ours 8"),
        (trtllm, {"heads": 0}, "no whole number of rows"),
    ],
)
def test_pages_that_cannot_be_rewritten_exactly_are_misses(
    start: Start,
    caplog: pytest.LogCaptureFixture,
    pool: Callable[[], EnginePool],
    settings: dict[str, Any],
    said: str,
) -> None:
    one = start(sglang())
    one.store(PAGES, FROM)
    one.close()
    other = start(pool(), "other", **settings)
    assert other.find(PAGES) == 0
    assert said in caplog.text


def test_a_folder_in_use_is_left_alone(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    one = start(sglang())
    one.store(PAGES, FROM)
    assert start(trtllm(), "other").find(PAGES) == 0
    assert "is in use by process" in caplog.text


def test_pages_of_a_folder_whose_index_is_damaged_are_found_in_its_slots(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = start(sglang())
    one.store(PAGES, FROM)
    expected = one.pool.numbers(FROM[0]).clone()
    one.close()
    index = next((tmp_path / "disk").rglob("index.sqlite"))
    damaged = bytearray(index.read_bytes())
    damaged[47] ^= 1
    index.write_bytes(damaged)
    other = start(trtllm(), "other")
    assert "its slots are read instead" in caplog.text
    assert other.find(PAGES) == 2
    assert other.load(PAGES, TO)
    assert torch.equal(other.pool.numbers(TO[0]), expected)
    assert index.read_bytes() == damaged, "the folder is its own unit's to mend"


def test_a_damaged_page_is_a_miss_and_its_neighbour_is_not(start: Start, tmp_path: Path) -> None:
    one = start(sglang())
    one.store(PAGES, FROM)
    first = one.pool.numbers(2).contiguous().numpy().tobytes()
    one.close()
    [slab] = (tmp_path / "disk").rglob("*.slab")
    content = bytearray(slab.read_bytes())
    at = content.find(first[:64])
    assert at > 0
    content[at] ^= 1
    slab.write_bytes(content)
    other = start(trtllm(), "other")
    assert other.find(PAGES) == 0
    assert other.cache.manager.tiers[2].counts.failed_reads == 1
    assert other.find(PAGES[1:]) == 1


def test_what_was_overwritten_since_is_a_miss(start: Start) -> None:
    """A page that its unit has overwritten is a miss for other engines. The second engine has read the first unit's
    index at its start, so it does not know which pages were overwritten later. It notices the change because each page
    on disk identifies itself.
    """
    slots = {"disk__bytes_per_folder": 3 * 8192}
    one = start(sglang(), **slots)
    one.store(PAGES, FROM)
    one.close()
    other = start(trtllm(), "other")
    again = start(sglang(), **slots)
    again.store(hashes_of("third", "fourth", "fifth", "sixth"), [1, 2, 3, 4])
    again.close()
    assert other.find(PAGES) == 0
    assert other.cache.manager.tiers[2].counts.failed_reads > 0


def test_nothing_in_another_units_folder_changes(start: Start, tmp_path: Path) -> None:
    one = start(sglang())
    one.store(PAGES, FROM)
    one.close()

    def content() -> dict[Path, tuple[int, bytes]]:
        files = [path for path in sorted((tmp_path / "disk").rglob("*")) if path.is_file()]
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    # The slab is truncated, so its index has rows beyond the slab's end. Only the slab's own unit may drop these rows.
    [slab] = (tmp_path / "disk").rglob("*.slab")
    with open(slab, "r+b") as file:
        file.truncate(slab.stat().st_size // 2)
    before = content()
    other = start(trtllm(), "other")
    other.find(PAGES)
    other.close()
    after = content()
    assert before == {path: after[path] for path in before}


def test_a_reader_that_breaks_fails_its_op(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    one = start(sglang())
    one.store(PAGES, FROM)
    one.close()
    other = start(trtllm(), "other")

    def broken(*_: object) -> str:
        raise ValueError("a fault that nobody thought of")

    monkeypatch.setattr("flexkv.storage.peer_reader.PeerReader._bring", broken)
    assert other.find(PAGES) == 0
    assert other.cache.manager.tiers[2].counts.failed_reads > 0
    other.cache.manager.check_integrity()


def test_a_disk_that_hangs_costs_its_pages_and_no_more(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    one = start(sglang())
    one.store(PAGES, FROM)
    one.close()
    other = start(trtllm(), "other", disk__stuck_s=0.2)
    hangs, bring = threading.Event(), PeerReader._bring
    brought: list[str] = []

    def hang(reader: PeerReader, *page: Any) -> str:
        assert hangs.wait(60)
        brought.append(bring(reader, *page))
        return brought[-1]

    monkeypatch.setattr(PeerReader, "_bring", hang)
    assert other.find(PAGES) == 0
    manager = other.cache.manager
    assert not manager.work.moving, "a read that hangs is waited for"
    assert other.find(PAGES) == 0
    assert not manager.tiers[2].present(0, other.keys(PAGES)).any()
    other.cache.manager.check_integrity()
    # Let the page arrive. The reader discards it, because the page's slot may already belong to another page.
    hangs.set()
    other.close()
    assert "was not read within" in brought[0]


def test_a_disk_that_hangs_at_the_end_is_left_behind(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    one = start(sglang())
    one.store(PAGES, FROM)
    one.close()
    other = start(trtllm(), "other", transfer__close_s=0.3)
    hangs, ended, bring = threading.Event(), threading.Event(), PeerReader._bring
    brought: list[str] = []

    def hang(reader: PeerReader, *page: Any) -> str:
        assert hangs.wait(60)
        brought.append(bring(reader, *page))
        ended.set()
        return brought[-1]

    monkeypatch.setattr(PeerReader, "_bring", hang)
    assert other.cache.match("r", other.keys(PAGES), 0.05) == 0
    assert other.cache.manager.work.moving
    other.cache.close()
    assert not other.cache.manager.work.moving, "what hangs was given up"
    # When the read continues, the host slots are already free or hold other pages.
    hangs.set()
    assert ended.wait(60)
    assert brought[0].startswith("closed, and a page was not read within")


def test_kv_of_weights_without_a_name_is_not_taken(start: Start) -> None:
    """Pages that a unit stores after a reset are not used by other engines, because only the unit's own process knows
    to which weights these pages belong.
    """
    one = start(sglang())
    one.cache.manager.reset()
    one.store(PAGES, FROM)
    one.close()
    assert start(trtllm(), "other").find(PAGES) == 0


def test_new_weights_here_make_theirs_misses(start: Start) -> None:
    one = start(sglang())
    one.store(PAGES, FROM)
    one.close()
    other = start(trtllm(), "other")
    other.cache.manager.reset()
    assert other.find(PAGES) == 0
