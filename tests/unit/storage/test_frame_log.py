"""Reads of the file of frames beside an index: after a crash, after damage, and after writes by another writer or by a
unit with another identity.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flexkv.errors import ContractError, DiskError
from flexkv.storage import frame_log
from flexkv.storage.frame_log import FRAME, HEADER, FrameLog

NAME = bytes(range(32))
FRAMES = [b"one", b"two" * 1000, b"three"]


@contextmanager
def opened(path: Path, identity: bytes = NAME) -> Iterator[FrameLog]:
    log = FrameLog(path, identity, 0.0)
    try:
        yield log
    finally:
        log.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "frames"
    with opened(path) as log:
        assert list(log.frames()) == []
        for content in FRAMES:
            log.append(content)
    return path


def frames(path: Path) -> list[bytes]:
    with opened(path) as log:
        return list(log.frames())


def test_frames_come_back_in_their_order(path: Path) -> None:
    assert frames(path) == FRAMES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("cut", [1, len(FRAMES[2]), len(FRAMES[2]) + 1, len(FRAMES[2]) + FRAME.size - 1])
def test_a_frame_that_was_not_written_to_its_end_is_cut_off(path: Path, cut: int) -> None:
    os.truncate(path, path.stat().st_size - cut)
    with opened(path) as log:
        assert list(log.frames()) == FRAMES[:2]
        log.append(b"four")
    assert frames(path) == [*FRAMES[:2], b"four"]


@pytest.mark.parametrize("at", [HEADER.size, HEADER.size + 4, HEADER.size + 8, HEADER.size + FRAME.size])
def test_nothing_behind_a_damaged_frame_is_read(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    assert frames(path) == []


def test_control_damage_behind_the_first_frame_leaves_it(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[HEADER.size + FRAME.size + len(FRAMES[0]) + FRAME.size] ^= 1
    path.write_bytes(content)
    assert frames(path) == FRAMES[:1]


@pytest.mark.parametrize("length", [0, 5, HEADER.size - 1])
def test_a_file_without_a_whole_header_is_begun(path: Path, length: int) -> None:
    os.truncate(path, length)
    with opened(path) as log:
        assert not log.was_other
        assert list(log.frames()) == []
        log.append(b"anew")
    assert frames(path) == [b"anew"]


def test_a_file_of_another_identity_is_begun_anew(path: Path) -> None:
    with opened(path, bytes(32)) as log:
        assert log.was_other
        assert not log.was_damaged
        assert list(log.frames()) == []
    with opened(path, bytes(32)) as log:
        assert not log.was_other


@pytest.mark.parametrize("at", [0, 8, HEADER.size - 1])
def test_a_damaged_header_is_told_from_another_identity(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    with opened(path) as log:
        assert log.was_damaged
        assert not log.was_other
        assert list(log.frames()) == []
    with opened(path) as log:
        assert not log.was_damaged


def test_replaced_frames_are_the_only_ones_and_more_follow(path: Path) -> None:
    with opened(path) as log:
        log.replace(content.upper() for content in log.frames())
        log.append(b"four")
    assert frames(path) == [*(content.upper() for content in FRAMES), b"four"]
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_replacement_that_fails_leaves_the_file_as_it_was(path: Path) -> None:
    def breaks() -> Iterator[bytes]:
        yield b"one"
        raise OSError(5, "broken")

    with opened(path) as log, pytest.raises(OSError, match="broken"):
        log.replace(breaks())
    assert frames(path) == FRAMES
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_replacement_that_may_not_outlive_a_loss_of_power_is_in_use(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(folder: Path) -> None:
        raise OSError(5, "broken")

    monkeypatch.setattr(frame_log, "sync_folder", breaks)
    with opened(path) as log:
        with pytest.raises(OSError, match="broken"):
            log.replace([b"new"])
        log.append(b"four")
    assert frames(path) == [b"new", b"four"]


def test_a_cleared_file_has_the_frames_that_follow_alone(path: Path) -> None:
    with opened(path) as log:
        os.truncate(path, path.stat().st_size - 1)
        log.clear()
        log.append(b"four")
    assert frames(path) == [b"four"]


def test_a_file_in_use_is_refused_until_it_is_closed(path: Path) -> None:
    with opened(path) as log:
        with pytest.raises(DiskError, match="in use"):
            FrameLog(path, NAME, 0.0)
        log.replace(FRAMES)
        with pytest.raises(DiskError, match="in use"):
            FrameLog(path, NAME, 0.0)
    assert frames(path) == FRAMES


def test_wrong_sizes_are_refused(path: Path) -> None:
    with pytest.raises(ContractError, match="allowed are 32"):
        FrameLog(path, b"short", 0.0)
    with opened(path) as log, pytest.raises(ContractError, match="a frame of 0 bytes"):
        log.append(b"")


def test_a_folder_that_is_gone_is_a_disk_error(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="No such file"):
        FrameLog(tmp_path / "gone" / "frames", NAME, 0.0)
