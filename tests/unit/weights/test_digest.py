"""The digest of complete files: on what it depends, and what happens if files change, cannot be read or take too long
to read."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from pathlib import Path

import pytest

from flexkv.errors import ConfigError
from flexkv.weights import digest
from flexkv.weights.digest import ChangedError, DigestError, StoppedError, digest_files, whole_identity
from flexkv.weights.files import FileState


def digest_of(file: Path) -> str:
    found: list[str] = []
    digest_files({file: FileState.of(file)}, threading.Event(), lambda *said: found.append(said[2]))
    (text,) = found
    return text


def test_ranges_are_hashed_as_specified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "RANGE_BYTES", 8192)
    content = bytes(i * 11 % 256 for i in range(20_000))
    (tmp_path / "x").write_bytes(content)
    ranges = [hashlib.sha256(content[at : at + 8192]).digest() for at in (0, 8192, 16384)]
    whole = hashlib.sha256(b"flexkv weights 1" + (20_000).to_bytes(8, "little") + b"".join(ranges))
    assert digest_of(tmp_path / "x") == whole.hexdigest()


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, digest.BLOCK_BYTES, digest.BLOCK_BYTES + 1])
def test_every_byte_counts(tmp_path: Path, size: int) -> None:
    content = bytearray(size)
    (tmp_path / "x").write_bytes(content)
    before = digest_of(tmp_path / "x")
    assert digest_of(tmp_path / "x") == before
    for place in {0, size // 2, size - 1} if size else set():
        content[place] ^= 1
        (tmp_path / "x").write_bytes(content)
        assert digest_of(tmp_path / "x") != before
        content[place] ^= 1
    (tmp_path / "x").write_bytes(content + b"\0")
    assert digest_of(tmp_path / "x") != before


def test_a_file_system_without_direct_reads_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_bytes(b"x" * 10_000)
    direct = digest_of(tmp_path / "x")
    advised: list[int] = []
    advise = os.posix_fadvise
    monkeypatch.setattr(digest, "_open", lambda path: (os.open(path, os.O_RDONLY), False))

    def noted(*call: int) -> None:
        advised.append(call[3])
        advise(*call)

    monkeypatch.setattr(os, "posix_fadvise", noted)
    assert digest_of(tmp_path / "x") == direct
    assert advised == [os.POSIX_FADV_DONTNEED]


def test_a_file_with_another_state_than_expected_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x" * 10_000)
    state = FileState.of(tmp_path / "x")
    for other in (state._replace(mtime_ns=1), state._replace(inode=1), state._replace(size=9_999)):
        with pytest.raises(ChangedError, match=r"/x changed while it was read"):
            digest_files({tmp_path / "x": other}, threading.Event(), lambda *_: None)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x")
    state = FileState.of(tmp_path / "x")
    (tmp_path / "x").unlink()
    with pytest.raises(DigestError, match=r"/x: No such file"):
        digest_files({tmp_path / "x": state}, threading.Event(), lambda *_: None)


def test_it_can_be_given_up(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x")
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError):
        digest_files({tmp_path / "x": FileState.of(tmp_path / "x")}, stop, lambda *_: None)


def test_its_threads_are_behind_all_others(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x")
    seen: list[int] = []

    def done(path: Path, state: FileState, text: str) -> None:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    own = os.getpriority(os.PRIO_PROCESS, 0)
    digest_files({tmp_path / "x": FileState.of(tmp_path / "x")}, threading.Event(), done)
    digest_files({tmp_path / "x": FileState.of(tmp_path / "x")}, threading.Event(), done, background=False)
    assert seen == [digest.READER_NICE, own]
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


def test_an_adapter_larger_than_a_request_may_wait_for_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.bin").write_bytes(b"x" * 1000)
    assert whole_identity(tmp_path, 1000).startswith("content:")
    with pytest.raises(ConfigError, match="1000 bytes of weights; up to 999"):
        whole_identity(tmp_path, 999)


def test_a_system_that_keeps_the_priority_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_bytes(b"weights")
    before = digest_of(tmp_path / "x")

    def refused(*_: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", refused)
    assert digest_of(tmp_path / "x") == before
