"""After a restart, flexkv announces the pages that the earlier process left on disk. A router that knows only KV events
then predicts the served tokens exactly.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.request import Request

from flexkv.adapters.common import event_book
from flexkv.adapters.common.event_book import BOOK_NAME
from flexkv.adapters.vllm import scheduler
from flexkv.storage.frame_log import FrameLog
from tests.soak import soak_factor
from tests.unit.adapters.router_process import serve
from tests.unit.adapters.router_world import IMAGE_BYTES, Router, World
from tests.unit.adapters.vllm_objects import BLOCK_TOKENS, image, lora, make_request

Make = Callable[..., World]
REQUESTS = 60
WITHIN_S = 60.0


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Make]:
    """Returns a function that makes worlds with the same folder. Each call first closes the world that the previous
    call made.
    """
    worlds: list[World] = []

    def make(**settings: Any) -> World:
        if worlds:
            worlds[-1].engine.close()
        worlds.append(World(tmp_path, Router(), len(worlds), **settings))
        return worlds[-1]

    yield make
    if worlds:
        worlds[-1].engine.close()


def book(folder: Path) -> Path:
    [path] = folder.rglob(BOOK_NAME)
    return path


def one_request(blocks: int = 3, name: str = "one", **fields: Any) -> Request:
    return make_request([*range(100, 100 + blocks * BLOCK_TOKENS), 7], name, **fields)


def found(world: World, drain: bool = True) -> list[BlockStored]:
    """Returns the stored blocks that the world announces before it serves a request."""
    if drain:
        world.engine.drain()
    return [event for event in world.engine.take_events() if isinstance(event, BlockStored)]


# --- random requests over restarts ---


@pytest.mark.soak
@pytest.mark.parametrize("killed", [False, True], ids=["ended", "killed"])
@pytest.mark.parametrize("mode", ["through", "evict"])
def test_a_router_predicts_what_is_served_over_restarts(tmp_path: Path, mode: str, killed: bool) -> None:
    is_left = False  # whether the previous process left pages that this process finds
    for number in range(1 + 2 * soak_factor()):
        served = serve(tmp_path, number, REQUESTS, killed, **{"disk.mode": mode})
        assert (served.over, served.under) == (0, 0), f"process {number}: {served}"
        assert served.hits
        assert served.removals
        assert bool(served.found) == is_left, f"process {number}: {served}"
        is_left = not served.resets


def serve_some(world: World) -> tuple[int, int]:
    """Serves some random requests. Returns how often the router predicted more tokens than were served, and how often
    fewer.
    """
    over = under = 0
    for _ in range(REQUESTS):
        predicted, served = world.serve_one()
        over += predicted > served
        under += predicted < served
    return over, under


def test_control_a_router_that_is_told_of_pages_that_have_left_is_wrong(
    make_world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_some(make_world())
    monkeypatch.setattr(event_book, "_keys_of", lambda frame: iter(()))
    world = make_world()
    world.settle()
    assert serve_some(world) == (0, 0), "the index alone knows after a normal exit"
    world = make_world()
    believe_in_all(world, monkeypatch)
    world.settle()
    over, under = serve_some(world)
    assert over
    assert not under


class TellsOfAll:
    """Stands for a disk tier that claims to have every page."""

    in_use = True

    def generations(self, group: int, keys: Any) -> Any:
        return np.full(len(keys), 2**63, np.uint64)


def believe_in_all(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the disk index list every page, as after a crash that happened before removals were recorded."""
    assert world.engine.side.events is not None
    monkeypatch.setattr(world.engine.side.events, "_disk", TellsOfAll())


class NamesFormerPages:
    """Stands for disks whose index still lists earlier pages of some blocks. These pages were removed, and other pages
    of the same blocks were written. This happens after a crash if the index had not recorded the two changes yet.
    """

    in_use = True

    def __init__(self, disks: Any, keys: Any, generations: Any) -> None:
        self._pages = {key.tobytes(): each for key, each in zip(keys, generations, strict=True)}
        self.forget = disks.forget

    def generations(self, group: int, keys: Any) -> Any:
        return np.array([self._pages.get(key.tobytes(), 0) for key in keys], np.uint64)


@pytest.mark.parametrize("index", ["former", "now"])
@pytest.mark.parametrize("shrunk", [False, True], ids=["grown", "shrunk"])
def test_a_page_is_not_announced_where_the_index_names_an_earlier_one_of_its_block(
    make_world: Make, monkeypatch: pytest.MonkeyPatch, index: str, shrunk: bool
) -> None:
    world = make_world()
    disks, keys = world.engine.unit.own_disks, world.engine.keys_of(one_request())
    for name in ("one", "again"):
        world.engine.run(one_request(name=name))
        world.settle()
        if name == "one":
            former = disks.generations(0, keys)
            world.engine.unit.manager.forget(0, keys)
    assert (disks.generations(0, keys) > former).all()
    if shrunk:
        monkeypatch.setattr(event_book, "SLACK_RECORDS", 0)
        monkeypatch.setattr(event_book, "RECORDS_PER_PAGE", 0)
        world.engine.run(make_request([*range(900, 900 + BLOCK_TOKENS), 7], "more"))
        world.settle()
    world = make_world()
    if index == "former":
        assert world.engine.side.events is not None
        monkeypatch.setattr(
            world.engine.side.events, "_disk", NamesFormerPages(world.engine.unit.own_disks, keys, former)
        )
    assert len(found(world)) == (0 if index == "former" else 3 + shrunk)
    # Pages that were not announced are not served either.
    assert world.engine.run(one_request(name="now")) == (0 if index == "former" else 3 * BLOCK_TOKENS)


# --- one request ---


def test_found_blocks_are_announced_as_the_first_process_announced_them(make_world: Make) -> None:
    world = make_world()
    request = one_request(cache_salt="s", mm_features=[image("0" * 64, 5, 2)])
    world.engine.run(request)
    world.engine.until(lambda: not world.engine.unit.driver.busy)
    first = [event for event in world.engine.take_events() if event.medium == "STORAGE"]
    assert len(first) == 3
    again = make_world()
    assert found(again) == first
    assert again.engine.take_events() == []
    again.router.hear(first)
    predicted = again.router.predicted(
        one_request(name="two", cache_salt="s", mm_features=[image("0" * 64, 5, 2)])
    )
    assert predicted == 3 * BLOCK_TOKENS
    assert (
        again.engine.run(one_request(name="two", cache_salt="s", mm_features=[image("0" * 64, 5, 2)]))
        == predicted
    )


def test_a_block_that_comes_back_to_host_memory_is_announced_there(make_world: Make) -> None:
    make_world().engine.run(one_request())
    world = make_world()
    world.settle()
    assert not world.router.has["CPU"]
    assert world.engine.run(one_request(name="two")) == 3 * BLOCK_TOKENS
    world.settle()
    assert world.router.has["CPU"] == world.router.has["STORAGE"]
    assert len(world.router.has["CPU"]) == 3


def test_blocks_that_left_before_the_end_are_not_announced(make_world: Make) -> None:
    world = make_world()
    world.engine.run(one_request())
    world.settle()
    world.engine.unit.manager.forget(0, world.engine.keys_of(one_request())[1:])
    assert len(found(make_world())) == 1


@pytest.mark.parametrize("room", [0, event_book.MAX_FOUND], ids=["still read", "read"])
def test_blocks_that_leave_before_they_are_announced_are_not_announced_by_the_next(
    make_world: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    make_world().engine.run(one_request())
    with monkeypatch.context() as slow:
        slow.setattr(event_book, "MAX_FOUND", room)
        slow.setattr(event_book.EventBook, "take", lambda book: [])
        world = make_world()
        world.engine.step({})
        size = book(tmp_path).stat().st_size
        world.engine.unit.manager.forget(0, world.engine.keys_of(one_request())[1:])
        # The removals must reach the file before an orderly shutdown, because the process may crash instead.
        world.engine.until(lambda: book(tmp_path).stat().st_size > size)
        assert found(world, drain=False) == []
    world = make_world()
    believe_in_all(world, monkeypatch)
    assert len(found(world)) == 1


def test_nothing_is_announced_after_a_reset(make_world: Make) -> None:
    world = make_world()
    world.engine.run(one_request())
    world.settle()
    world.engine.side.reset()
    assert found(make_world()) == []


def test_inputs_whose_names_serve_one_run_are_not_announced_by_the_next(make_world: Make) -> None:
    world = make_world()
    world.engine.run(one_request(mm_features=[image("cat", BLOCK_TOKENS + 1, 2)]))
    assert len(found(make_world())) == 1, "the block before the image"


def test_blocks_of_an_adapter_are_not_announced_by_the_next(make_world: Make, tmp_path: Path) -> None:
    """Blocks of an adapter are not announced after a restart, because the adapter's name may stand for different
    content in the next process.
    """
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_bytes(b"weights")
    world = make_world()
    world.engine.run(one_request(lora_request=lora("mine", path=str(adapter))))
    world.settle()
    assert len(world.router.has["STORAGE"]) == 3
    assert found(make_world()) == []


def test_lazily_stored_blocks_are_announced_by_their_hashes_alone(make_world: Make) -> None:
    lazy = {"blocks": 9, "store.mode": "lazy", "store.max_reference_share": 1.0}
    world = make_world(**lazy)
    for number in range(2):
        world.engine.run(make_request(range(300 * number, 300 * number + 28), f"r{number}"))
    world.settle()
    before = world.router.has["STORAGE"]
    assert before
    events = found(make_world(**lazy))
    assert {block_hash for event in events for block_hash in event.block_hashes} == before
    assert {(event.parent_block_hash, tuple(event.token_ids)) for event in events} == {(None, ())}


def test_without_events_no_file_is_written(
    make_world: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    assert world.engine.side.events is not None
    monkeypatch.setattr(world.engine.side, "events", None)
    world.engine.run(one_request())
    world.engine.close()
    assert not list(tmp_path.rglob(BOOK_NAME))


# --- records that must be ignored ---


def test_hashes_of_another_seed_are_not_announced_and_the_log_says_so(
    make_world: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_world().engine.run(one_request())
    monkeypatch.setattr(scheduler, "hash_identity", lambda tokens, algorithm: bytes(32))
    with caplog.at_level(logging.WARNING):
        assert found(make_world()) == []
    assert caplog.text.count("PYTHONHASHSEED") == 1
    monkeypatch.undo()
    assert found(make_world()) == [], "what the file had is gone"


def test_entries_without_a_page_in_the_index_are_not_announced(make_world: Make, tmp_path: Path) -> None:
    world = make_world()
    world.engine.run(one_request())
    world.engine.close()
    kept = tmp_path / "kept"
    shutil.copy(book(tmp_path), kept)
    for path in book(tmp_path).parent.iterdir():
        path.unlink()
    world = make_world()
    world.settle()
    world.engine.close()
    shutil.copy(kept, book(tmp_path))
    assert found(make_world()) == []


def test_entries_of_a_slab_that_is_made_anew_are_not_announced(make_world: Make, tmp_path: Path) -> None:
    world = make_world()
    world.engine.run(one_request())
    world.engine.close()
    slab = book(tmp_path).with_name("group0.slab")
    for path in (slab, slab.with_suffix(".header")):
        with path.open("r+b") as file:
            file.write(bytes(4096))
    assert found(make_world()) == []


def test_a_page_that_was_damaged_is_removed_once_it_was_read(make_world: Make, tmp_path: Path) -> None:
    world = make_world()
    world.engine.run(one_request())
    world.engine.close()
    slab = book(tmp_path).with_name("group0.slab")
    content = bytearray(slab.read_bytes())
    for at in range(len(content) % IMAGE_BYTES + 64, len(content), IMAGE_BYTES):
        content[at] ^= 1
    slab.write_bytes(content)
    world = make_world()
    world.settle()
    assert world.router.predicted(one_request(name="two")) == 3 * BLOCK_TOKENS
    assert world.engine.run(one_request(name="two")) == 0
    world.settle()
    assert serve_some(world) == (0, 0)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9])
def test_a_file_that_lost_its_end_announces_less_and_nothing_wrong(
    make_world: Make, tmp_path: Path, part: float
) -> None:
    serve_some(make_world())
    world = make_world()
    world.settle()
    whole = len(world.router.has["STORAGE"])
    world.engine.close()
    path = book(tmp_path)
    with path.open("r+b") as file:
        file.truncate(int(part * path.stat().st_size))
    world = make_world()
    world.settle()
    assert len(world.router.has["STORAGE"]) < whole


# --- the file that lists the announced blocks ---


def test_the_file_shrinks_to_what_is_on_disk(
    make_world: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_book, "SLACK_RECORDS", 16)
    serve_some(make_world())
    serve_some(make_world())
    size = book(tmp_path).stat().st_size
    monkeypatch.setattr(event_book, "SLACK_RECORDS", 1 << 20)
    world = make_world()
    world.settle()
    assert world.router.has["STORAGE"]
    per_record = 200
    assert size < per_record * (4 * 40 + 2 * 16)
    assert serve_some(world) == (0, 0)
    serve_some(world)
    world.engine.close()
    assert book(tmp_path).stat().st_size > 2 * size, "control: without a limit it grows"


def cannot_replace(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes every rewrite of the file that lists the announced pages fail. Returns a list that gets one item per
    attempt.
    """
    tries: list[int] = []
    replace = FrameLog.replace

    def fails(log: FrameLog, frames: Iterable[bytes]) -> None:
        if frames == ():
            return replace(log, frames)  # this call only creates the file
        tries.append(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FrameLog, "replace", fails)
    return tries


def test_a_file_that_cannot_be_rewritten_keeps_what_it_names(
    make_world: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_book, "SLACK_RECORDS", 16)
    monkeypatch.setattr(event_book, "MOST_GROWTH", 1 << 20)
    world = make_world()
    with monkeypatch.context() as full, caplog.at_level(logging.WARNING):
        tries = cannot_replace(full)
        serve_some(world)
        serve_some(world)
        world.settle()
        world.engine.close()
    assert 1 <= len(tries) < 20, "it is tried again only at twice the size"
    assert caplog.text.count("cannot be rewritten") == 1
    assert "begins anew" not in caplog.text
    served = world.router.has["STORAGE"]
    world = make_world()
    world.settle()
    assert world.router.has["STORAGE"] == served


def test_control_a_file_that_grows_too_much_begins_anew(
    make_world: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_book, "SLACK_RECORDS", 16)
    monkeypatch.setattr(event_book, "MOST_GROWTH", 0)
    world = make_world()
    with monkeypatch.context() as full, caplog.at_level(logging.WARNING):
        cannot_replace(full)
        serve_some(world)
        serve_some(world)
        world.settle()
        world.engine.close()
    assert caplog.text.count("begins anew") == 1
    served = world.router.has["STORAGE"]
    world = make_world()
    world.settle()
    assert world.router.has["STORAGE"] < served


def test_a_file_that_cannot_be_written_costs_the_announcement_alone(
    make_world: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world()
    world.settle()
    world.engine.close()
    path = book(tmp_path)
    path.unlink()
    path.mkdir()
    with caplog.at_level(logging.WARNING):
        world = make_world()
        assert serve_some(world) == (0, 0)
        world.engine.close()
    assert "announces less" in caplog.text


@pytest.mark.parametrize("per_block", [4, 0], ids=["few records", "many records"])
def test_a_close_leaves_a_file_as_it_is_to_which_nothing_was_added(
    make_world: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_block: int
) -> None:
    make_world().engine.run(one_request())
    monkeypatch.setattr(event_book, "SLACK_RECORDS", 2)
    monkeypatch.setattr(event_book, "RECORDS_PER_PAGE", per_block)
    world = make_world()
    assert len(found(world)) == 3
    before = book(tmp_path).stat()
    world.engine.close()
    assert os.path.samestat(book(tmp_path).stat(), before)


def test_after_a_write_that_failed_nothing_older_is_believed(
    make_world: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world()
    world.engine.run(one_request())
    world.settle()
    failed = threading.Event()

    def fails(log: FrameLog, content: bytes) -> None:
        failed.set()
        raise OSError(errno.ENOSPC, "No space left on device")

    later = make_request([*range(500, 500 + 2 * BLOCK_TOKENS), 7], "later")
    with caplog.at_level(logging.WARNING):
        with monkeypatch.context() as full:
            full.setattr(FrameLog, "append", fails)
            world.engine.unit.manager.forget(0, world.engine.keys_of(one_request()))
            assert failed.wait(WITHIN_S)
        world.engine.run(later)
        world.settle()
        world.engine.close()
    assert caplog.text.count("begins anew") == 1
    world = make_world()
    believe_in_all(world, monkeypatch)
    assert [event.block_hashes for event in found(world)] == [
        [maybe_convert_block_hash(each)] for each in later.block_hashes
    ]


def test_hashes_that_cannot_be_named_cost_the_announcement_alone(
    make_world: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks(tokens: int, algorithm: str) -> bytes:
        raise RuntimeError("no such hash")

    make_world().engine.run(one_request())
    with monkeypatch.context() as broken, caplog.at_level(logging.WARNING):
        broken.setattr(scheduler, "hash_identity", breaks)
        world = make_world()
        assert found(world) == []
        assert serve_some(world) == (0, 0)
    assert caplog.text.count("RuntimeError: no such hash") == 1


def test_a_tier_that_is_out_of_use_is_not_announced(make_world: Make) -> None:
    make_world().engine.run(one_request())
    world = make_world()
    world.engine.unit.manager.tiers[1].go_down("its lane has ended")
    assert found(world) == []


def test_blocks_that_lazy_stores_name_by_their_hashes_stay_announced_by_the_next(
    make_world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks stay announced after the next restart even if a lazy store described them only by their hashes. In this
    test, `store.mode` changes at a restart, and a block is stored lazily before the file that describes it is read.
    """
    make_world().engine.run(one_request())
    lazy = {"blocks": 9, "store.mode": "lazy", "store.max_reference_share": 1.0}
    with monkeypatch.context() as slow:
        slow.setattr(event_book.EventBook, "take", lambda book: [])
        world = make_world(**lazy)
        slow.setattr(world.engine, "drain", world.engine.step)  # `drain` would wait until the file is read
        events = world.engine.side.events
        assert events is not None
        not_loaded = {"kv_transfer_params": {"flexkv.max_load_tokens": 0}}
        assert world.engine.run(one_request(extra_args=not_loaded)) == 0
        world.engine.run(make_request(range(300, 328), "another"))
        keys = {key.tobytes() for key in world.engine.keys_of(one_request())}
        world.engine.until(lambda: bool(keys & events._pages.keys()))
    monkeypatch.setattr(event_book, "SLACK_RECORDS", 0)
    monkeypatch.setattr(event_book, "RECORDS_PER_PAGE", 0)
    world.settle()
    world.engine.run(make_request(range(600, 628), "third"))
    world.settle()
    hashes = {maybe_convert_block_hash(each) for each in one_request().block_hashes}
    assert hashes <= world.router.has["STORAGE"]
    assert hashes <= {each for event in found(make_world()) for each in event.block_hashes}
