"""A folder keeps the name of the weights with which its pages were computed. flexkv writes the name durably. If it is
damaged, the weights count as unknown.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from flexkv.errors import DiskError
from flexkv.storage.weights_name import WEIGHTS_NAME, NamedDisks, read_weights, write_weights

ONE, OTHER = bytes(range(32)), bytes(32)
WITHIN_S = 60.0


def test_what_was_written_is_read(tmp_path: Path) -> None:
    assert read_weights(tmp_path) is None
    write_weights(tmp_path, ONE, 4)
    assert read_weights(tmp_path) == (ONE, 4)
    write_weights(tmp_path, OTHER, (1 << 32) - 1)
    assert read_weights(tmp_path) == (OTHER, (1 << 32) - 1)
    assert [path.name for path in tmp_path.iterdir()] == [WEIGHTS_NAME]


def test_any_flipped_bit_makes_it_unknown(tmp_path: Path) -> None:
    write_weights(tmp_path, ONE, 4)
    file = tmp_path / WEIGHTS_NAME
    whole = file.read_bytes()
    for at in range(len(whole)):
        for bit in (1, 0x20, 0x80):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
            assert read_weights(tmp_path) is None, (at, bit)
    for end in range(len(whole)):
        file.write_bytes(whole[:end])
        assert read_weights(tmp_path) is None


def test_pages_of_other_weights_or_another_epoch_are_strange(tmp_path: Path) -> None:
    write_weights(tmp_path, ONE, 4)
    disks = NamedDisks()
    disks.begin(0, tmp_path, has_pages=True)
    disks.begin(1, tmp_path / "new", has_pages=False)
    assert disks.strange(ONE, 4) == ()
    assert disks.strange(OTHER, 4) == (0,)
    assert disks.strange(ONE, 6) == (0,)
    disks.begin_epoch()
    assert disks.strange(OTHER, 6) == ()


def test_a_name_is_written_to_every_disk_that_lacks_it(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    disks = NamedDisks()
    for disk, folder in enumerate(folders):
        folder.mkdir()
        disks.begin(disk, folder, has_pages=False)
    disks.name(ONE, 0)
    disks.finish(WITHIN_S)
    assert [read_weights(folder) for folder in folders] == [(ONE, 0)] * 2
    before = [(folder / WEIGHTS_NAME).stat().st_ino for folder in folders]
    disks.name(ONE, 0)
    disks.finish(WITHIN_S)
    assert [(folder / WEIGHTS_NAME).stat().st_ino for folder in folders] == before


def test_a_disk_that_takes_no_name_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disks = NamedDisks()
    disks.begin(0, tmp_path / "gone", has_pages=False)
    disks.name(ONE, 0)
    disks.finish(WITHIN_S)
    assert "the name of the weights could not be written" in caplog.text


def test_where_pages_are_gone_their_weights_name_no_later_ones(tmp_path: Path) -> None:
    """If a folder's slabs are created again, the recorded name of the old pages' weights is deleted. New pages are
    written before the new name is recorded. Otherwise, a crash between these two steps would leave the new pages under
    the old name."""
    write_weights(tmp_path, ONE, 0)
    NamedDisks().begin(0, tmp_path, has_pages=False)
    after_crash = NamedDisks()
    after_crash.begin(0, tmp_path, has_pages=True)
    assert after_crash.strange(ONE, 0) == (0,)


def test_control_pages_that_are_there_keep_their_weights(tmp_path: Path) -> None:
    write_weights(tmp_path, ONE, 0)
    NamedDisks().begin(0, tmp_path, has_pages=True)
    after_crash = NamedDisks()
    after_crash.begin(0, tmp_path, has_pages=True)
    assert after_crash.strange(ONE, 0) == ()


def test_a_disk_that_keeps_its_old_name_is_not_used(tmp_path: Path) -> None:
    (tmp_path / WEIGHTS_NAME).mkdir()
    with pytest.raises(DiskError, match="could not be removed"):
        NamedDisks().begin(0, tmp_path, has_pages=False)
