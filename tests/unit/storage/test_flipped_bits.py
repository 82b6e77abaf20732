"""After one flipped bit in any file that the disk tier reads back, every intact page is still found and every folder
can still be used."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from flexkv.storage.fsck import check_folder
from flexkv.storage.index import SlotIndex
from flexkv.storage.index_log import FRAME, HEADER, log_damage
from tests.soak import soak_factor
from tests.unit.storage.disk_world import key_of
from tests.unit.storage.flips import KEPT, Copies, flip_bit, make_folder

PAGE_BYTES = 4096
SQLITE_HEADER_BYTES = 100
PAGE_HEADER_BYTES = 12
SOAK = soak_factor() > 1
STRIDE = 1 if SOAK else 16
LOG_STRIDE = 1 if SOAK else 1024


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Turns logging off, because these tests open thousands of damaged folders."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in /dev/shm, where syncs take no time. Without /dev/shm, it is an ordinary folder."""
    shm = Path("/dev/shm")
    folder = shm / f"flips-{os.getpid()}" if os.access(shm, os.W_OK) else tmp_path / "flips"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def at_rest(memory: Path) -> Copies:
    """Copies of a folder whose unit was closed. Its index is a single file, without a log."""
    world = make_folder(memory / "original")
    assert world.close()
    return Copies(memory / "original", memory / "work", world)


@pytest.fixture
def crashed(memory: Path) -> Copies:
    """Copies of a folder as a crash leaves it: only the index's log contains the last commits."""
    world = make_folder(memory / "open")
    shutil.copytree(memory / "open", memory / "original")
    assert world.close()
    return Copies(memory / "original", memory / "work", world)


def index_offsets(size: int) -> Iterator[int]:
    """Yields the offsets of SQLite's header, of every SQLite page's header, and of every STRIDEth other byte."""
    for offset in range(size):
        in_header = offset < SQLITE_HEADER_BYTES or offset % PAGE_BYTES < PAGE_HEADER_BYTES
        if in_header or offset % STRIDE == 0:
            yield offset


def log_offsets(size: int) -> Iterator[int]:
    """Yields the offsets of the log's header, of the frames' headers, and of every LOG_STRIDEth other byte. A few other
    bytes suffice, because a digest covers each complete frame."""
    for offset in range(size):
        in_frame = (offset - HEADER.size) % (FRAME.size + PAGE_BYTES)
        if offset < HEADER.size or in_frame < FRAME.size or offset % LOG_STRIDE == 0:
            yield offset


@pytest.mark.soak
@pytest.mark.timeout(14400)
def test_a_flipped_bit_in_the_index_costs_no_page(at_rest: Copies) -> None:
    for what in at_rest.flips("index.sqlite", index_offsets, seed=1):
        at_rest.check_twice(what)


def test_a_schema_that_is_no_text_any_more_costs_no_page(at_rest: Copies) -> None:
    """A schema that is no valid text after a flipped bit costs no page. SQLite quotes the damaged schema in its error
    message, so this message may not be valid UTF-8."""
    schema = (at_rest.fresh() / "index.sqlite").read_bytes().index(b"CREATE TABLE")
    for offset in range(schema, schema + 60):
        flip_bit(at_rest.fresh() / "index.sqlite", offset, 7)
        at_rest.check_twice(f"bit 7 of byte {offset}")


@pytest.mark.soak
@pytest.mark.timeout(14400)
def test_a_flipped_bit_in_the_index_log_costs_no_page(crashed: Copies) -> None:
    for what in crashed.flips("index.sqlite-wal", log_offsets, seed=2):
        crashed.check_twice(what)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["epoch", "opens", "lock"])
def test_a_flipped_bit_in_a_small_file_costs_no_page(memory: Path, name: str) -> None:
    """A flipped bit in a small file loses no page. The tier must not give a generation twice, and must not serve pages
    of other weights."""
    world = make_folder(memory / "original", epoch=2)
    assert world.close()
    copies = Copies(memory / "original", memory / "work", world)
    for what in copies.flips(name, range, seed=3, bits=8 if SOAK else 1):
        copies.check_twice(what)


@pytest.mark.parametrize("name", ["index.sqlite", "index.sqlite-wal"])
def test_a_file_of_the_index_that_is_cut_short_costs_no_folder(crashed: Copies, name: str) -> None:
    """A log of the index that is cut short makes no folder unusable. Such a log looks like a log after a crash, so
    pages of the missing commits are not served. No served page is wrong, and the tier can still be opened and written
    to.
    """
    size = (crashed.fresh() / name).stat().st_size
    for length in range(0, size, 1000):
        os.truncate(crashed.fresh() / name, length)
        crashed.served()
        crashed.served()


def test_a_log_that_ends_in_the_middle_of_a_write_is_not_a_damaged_one(
    crashed: Copies,
) -> None:
    log = crashed.fresh() / "index.sqlite-wal"
    with open(log, "ab") as file:
        file.write(bytes(range(256)) * 10)  # stray bytes behind the log, such as those of an earlier one
    crashed.served()
    assert not (log.parent / "index.damaged").exists()


def commits(log: bytes) -> list[range]:
    """Returns, for each commit in the log, the offsets of its frames."""
    found, first = [], HEADER.size
    for at in range(HEADER.size, len(log), FRAME.size + PAGE_BYTES):
        if FRAME.unpack_from(log, at)[1]:
            end = at + FRAME.size + PAGE_BYTES
            found.append(range(first, end, FRAME.size + PAGE_BYTES))
            first = end
    return found


def lose_frame(log: Path, commit: int) -> None:
    """Erases the first frame of commit `commit`, as if only the commit's later frames had reached the disk."""
    frames = commits(log.read_bytes())[commit]
    assert len(frames) > 1
    with open(log, "r+b") as file:
        file.seek(frames[0])
        file.write(bytes(FRAME.size + PAGE_BYTES))


def test_a_power_cut_inside_a_commit_costs_no_page_and_is_named(crashed: Copies) -> None:
    for commit, cut in ((-1, True), (-2, False)):  # only the last commit of a log may be unsynced
        log = crashed.fresh() / "index.sqlite-wal"
        lose_frame(log, commit)
        assert log_damage(log).endswith("or a power cut ended its last commit") == cut
        crashed.check_twice(f"a frame of commit {commit} is lost")


def test_a_log_that_is_read_up_to_the_lost_frame_loses_a_durable_page(
    crashed: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shows why a lost frame in the last commit counts as damage. A power cut and a flipped bit leave the same log, and
    the last commit may hold a durable page."""
    lose_frame(crashed.fresh() / "index.sqlite-wal", -1)
    monkeypatch.setattr("flexkv.storage.index.log_damage", lambda path: "")
    assert KEPT - crashed.served() == {0}, "the last commit's page"


def test_a_stray_shared_memory_file_is_of_no_account(crashed: Copies) -> None:
    (crashed.fresh() / "index.sqlite-shm").write_bytes(bytes(range(256)) * 128)
    crashed.check_twice("a stray index.sqlite-shm")


@pytest.mark.parametrize("lose", [lambda path: flip_bit(path, 0, 1), Path.unlink], ids=["damaged", "gone"])
@pytest.mark.parametrize("epoch", [0, 2])
def test_without_epoch_and_index_no_page_is_served(
    memory: Path, epoch: int, lose: Callable[[Path], object]
) -> None:
    """If the file with the epoch and the index are lost, the tier serves no page, because it cannot tell whether pages
    belong to the current weights."""
    world = make_folder(memory / "original", epoch=epoch)
    assert world.close()
    copies = Copies(memory / "original", memory / "work", world)
    folder = copies.fresh()
    (folder / "index.sqlite").unlink()
    assert copies.served() >= KEPT, "the epoch alone is enough"
    folder = copies.fresh()
    (folder / "index.sqlite").unlink()
    lose(folder / "epoch")
    assert copies.served() == set()
    assert copies.served() == set()


@pytest.mark.parametrize("where", [18, 20, 47, 105, "a row"])
def test_fsck_names_a_damaged_index_and_repairs_it(at_rest: Copies, where: int | str) -> None:
    folder = at_rest.fresh(slab=True)
    index = folder / "index.sqlite"
    offset = where if isinstance(where, int) else index.read_bytes().index(key_of(40).tobytes())
    flip_bit(index, offset, 0)
    report = check_folder(folder)
    assert not report.clean
    assert any("index.sqlite: " in problem for problem in report.problems), report.problems
    assert check_folder(folder, repair=True).repaired
    assert (folder / "index.damaged").exists()
    assert check_folder(folder).clean
    assert at_rest.served() >= KEPT


def test_an_index_that_is_damaged_while_it_is_used_is_made_anew(memory: Path) -> None:
    """An index that is damaged during its use is made anew. It has more chunks than SQLite caches, so SQLite reads some
    damaged chunks from the file."""
    path, slots = memory / "index.sqlite", 80 * 1500
    index = SlotIndex(path, [slots])
    index.adopt([5])
    index.begin_use(1, 0)

    def publish(first: int, step: int, generation: int) -> None:
        at = np.arange(first, slots, step, dtype=np.int64)
        count = len(at)
        keys = np.random.default_rng(generation).integers(0, 256, (count, 16), np.uint8)
        numbers = np.full(count, generation, np.uint64)
        index.publish(0, at, keys, numbers, np.zeros(count, np.uint64), np.full(count, 16, np.int32), 7)
        index.commit()

    publish(0, 1, 1 << 40)
    size = path.stat().st_size
    for offset in range(PAGE_BYTES, size, PAGE_BYTES):
        flip_bit(path, offset, 3)  # the byte with the type of each SQLite page
    publish(3, 160, 2 << 40)
    assert path.with_name("index.damaged").exists()
    publish(5, 400, 3 << 40)
    wanted = index.rows[0].copy()
    index.close()
    again = SlotIndex(path, [slots])
    np.testing.assert_array_equal(again.rows[0], wanted)
    again.close()
