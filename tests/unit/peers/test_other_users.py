"""flexkv neither maps nor reads another user's files, and sends nothing to another user's unit, even if a folder's mode
would allow it.

As a control, each test first shows that the same action succeeds with the user's own files.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flexkv import c_ext
from flexkv.errors import ClosedError
from flexkv.peers.runtime_folder import runtime_folder, socket_path, write_card
from flexkv.peers.watch import Asked
from flexkv.storage.folder import slab_name
from tests.unit.adapters.vllm_objects import make_request
from tests.unit.peers.live_engines import DEADLINE_S, PROMPT, Make, knows, settings_of, share_of, wait_for

STRANGER = 12345
UNIT = "0" * 16

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")

BECOMES = """\
import os, socket, sys
os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[2]))
"""
"""The source of the beginning of a program. It changes the process's user, after Python has read its own files."""

ASKS = """\
line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
line.settimeout(30)
line.connect(sys.argv[1])
text, files, _, _ = socket.recv_fds(line, 1 << 20, 8)
print(len(text), len(files))
"""
"""The source of a program that asks a unit for its card and its descriptors."""

ANSWERS = """\
door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
door.settimeout(30)
door.bind(sys.argv[1])
door.listen(8)
print("listens", flush=True)
line, _ = door.accept()
line.settimeout(30)
print(line.send(b"x") if sys.stdin.readline() else 0, flush=True)
print(len(line.recv(1)), flush=True)
"""
"""The source of a program that imitates a unit, and sends arbitrary bytes in place of a card."""


def run_as(user: int, program: str, path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BECOMES + program, str(path), str(user)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def open_to_all(folder: Path) -> None:
    """Gives every user access to the folder and its parents, as an operator might do while a unit runs."""
    for above in (*folder.parents, folder):
        if above.stat().st_uid == os.geteuid() and above != Path("/"):
            above.chmod(above.stat().st_mode | 0o011)


@needs_root
@pytest.mark.parametrize("user", [0, STRANGER], ids=["the same user", "another"])
def test_a_card_goes_to_its_user_alone(make_engine: Make, tmp_path: Path, user: int) -> None:
    folder = tmp_path / "run"
    engine = make_engine(**settings_of(folder))
    door = socket_path(folder, share_of(engine)._card.unit)
    open_to_all(folder)
    door.chmod(0o777)
    with run_as(user, ASKS, door) as asking:
        answer, _ = asking.communicate(timeout=DEADLINE_S)
    text, files = map(int, answer.split())
    if user:
        assert (text, files) == (0, 0)
    else:
        assert text > 0
        assert files > 0


@needs_root
@pytest.mark.parametrize("user", [0, STRANGER], ids=["the same user", "another"])
def test_nothing_is_taken_from_another_user(make_engine: Make, tmp_path: Path, user: int) -> None:
    folder = tmp_path / "run"
    engine = make_engine(**settings_of(folder))
    share = share_of(engine)
    watch = share._watch
    assert watch is not None
    asked: set[str] = set()

    class Noted(dict[str, Asked]):
        def __setitem__(self, unit: str, line: Asked) -> None:
            asked.add(unit)
            super().__setitem__(unit, line)

    watch._peers = Noted()
    open_to_all(folder)
    folder.chmod(0o777)
    with run_as(user, ANSWERS, socket_path(folder, UNIT)) as posing:
        assert posing.stdin is not None
        assert posing.stdout is not None
        assert posing.stdout.readline() == "listens\n"
        socket_path(folder, UNIT).chmod(0o777)
        write_card(folder, UNIT, share._card.short())
        wait_for(lambda: UNIT in (watch._again_s if user else asked))
        assert (UNIT in asked) == (user == os.geteuid())
        print(file=posing.stdin, flush=True)
        posing.wait(DEADLINE_S)
    assert share.joined == 0


@needs_root
def test_memory_of_another_user_is_not_mapped() -> None:
    board, directory = c_ext.SlotBoard(8), c_ext.PeerDirectory()
    assert directory.add((board.fd, board.bytes)) == 0
    os.fchown(board.fd, STRANGER, -1)
    with pytest.raises(
        ClosedError, match=f"of this user with {board.bytes} bytes, found {board.bytes} of user"
    ):
        directory.add((board.fd, board.bytes))


@needs_root
@pytest.mark.parametrize("user", [0, STRANGER], ids=["the same user", "another"])
def test_a_slab_of_another_user_is_not_read(
    make_engine: Make, tmp_path: Path, user: int, caplog: pytest.LogCaptureFixture
) -> None:
    def engine(name: str):  # type: ignore[no-untyped-def]
        disk = {"disk.folders": str(tmp_path / name), "disk.bytes_per_folder": 4 << 20}
        return make_engine(**settings_of(tmp_path / "run", "disk") | disk)

    one = engine("a")
    one.run(make_request(PROMPT, "one"))
    one.until(lambda: not one.unit.busy)
    (slab,) = (tmp_path / "a").rglob(slab_name(0))
    os.chown(slab, user, -1)
    other = engine("b")
    if user:
        wait_for(lambda: f"{slab} is not a file of user {os.geteuid()}" in caplog.text)
        assert other.run(make_request(PROMPT, "two")) == 0
    else:
        wait_for(lambda: knows(other, 5))
        assert other.run(make_request(PROMPT, "two")) == 20


def test_the_folder_of_units_is_in_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own))
    assert runtime_folder(None) == own / "flexkv"
    assert (own / "flexkv").stat().st_mode & 0o777 == 0o700
    assert runtime_folder(str(tmp_path / "named")) == tmp_path / "named", "a setting comes first"


@pytest.mark.parametrize("above", ["open", "missing", None])
def test_without_a_folder_of_the_user_it_is_in_tmp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, above: str | None
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    if above is None:
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    else:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / above))
    usual = Path(f"/tmp/flexkv-{os.geteuid()}")
    was_there = usual.exists()
    assert runtime_folder(None) == usual
    if not was_there:
        usual.rmdir()
