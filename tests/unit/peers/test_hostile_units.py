"""If a unit's file, card or disk is invalid, other units do not use it, log the reason, and continue to share."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flexkv import c_ext
from flexkv.errors import ClosedError
from flexkv.peers import card as card_module
from flexkv.peers import share as share_module
from flexkv.peers.runtime_folder import MOST_FACTS_BYTES, card_path, read_cards, socket_path, write_card
from flexkv.storage.peer_folders import open_slab
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.vllm_objects import make_request
from tests.unit.peers.live_engines import DEADLINE_S, PROMPT, Make, knows, settings_of, share_of, wait_for

UNIT = "0" * 16
HOST = {
    "board_bytes": 4096,
    "file_bytes": 8192,
    "slots_offset": 0,
    "slot_bytes": 4096,
    "slots_per_extent": 1,
    "extent_stride": 4096,
    "digests": False,
}
GROUP_CHANGES: dict[str, dict[str, object]] = {
    "runs of texts": {"runs": [[["a", 1, 2]]]},
    "runs of several lengths": {"runs": [[[1], [1, 2]]]},
    "runs of large numbers": {"runs": [[[2**70, 1, 2]]]},
    "runs of no rank": {"runs": []},
    "no run": {"runs": [[]]},
    "no run of a layer": {"runs": [[[0, 1, 0], [1, 1, 2]]], "stripe_bytes": [2]},
    "a stripe of a text": {"stripe_bytes": ["x"]},
    "a stripe below 0": {"stripe_bytes": [-5]},
    "blocks of a text": {"block_tokens": "x"},
    "blocks of many tokens": {"block_tokens": 2**40},
    "no format": {"format_id": None},
    "an unknown format": {"format_id": "nonsense"},
    "no dtype": {"dtype": None},
    "an unknown rule": {"rule": "nonsense"},
    "a rule of a number": {"rule": 3},
    "a window of nothing": {"rule": "window"},
    "a large window": {"rule": "window", "reach": 2**40},
    "a signature of a number": {"signature": 3},
    "a signature of no hex digits": {"signature": "xy"},
    "a long signature": {"signature": "ab" * 5000},
}
FORMAT_TOKENS = {"a format of no tokens": "0", "a format of many digits": "9" * 5000}
"""For some of the invalid cards, by name: the number of tokens in the card's page format."""

CHANGES: dict[str, dict[str, object]] = {
    "no group": {"groups": []},
    "groups of numbers": {"groups": [1, 2]},
    "groups of a text": {"groups": "group"},
    "another unit": {"unit": "f" * 16},
    "no unit": {"unit": None},
    "a model of control codes": {"model": "\x1b[2J"},
    "a pid of a text": {"pid": "abc"},
    "a board of a text": {"host": HOST | {"board_bytes": "x"}},
    "a pool of nothing": {"host": dict.fromkeys(HOST, 0) | {"digests": False}},
    "a pool of large numbers": {"host": dict.fromkeys(HOST, 2**70) | {"digests": False}},
    "digests of a number": {"host": HOST | {"digests": 7}},
    "a folder of two strings": {"disk": {"board_bytes": 4096, "folders": ["/no\0pe"]}},
    "a folder of a number": {"disk": {"board_bytes": 4096, "folders": [7]}},
}
GROUPS = {"many groups": 65, "a group twice": 2}
TEXTS = {"deep": b"[" * 60_000, "no text": b"\xff\x00", "short": b"x"}


@contextmanager
def impostor(folder: Path, facts: dict[str, Any], text: bytes, files: list[int]) -> Iterator[threading.Event]:
    """Imitates a unit: writes a file with `facts` into the folder, and sends `text` as its card (the record that
    describes a unit to its peers), with the descriptors `files`, to the first peer that connects. Yields an event that
    is set when the card has been sent.
    """
    sent = threading.Event()
    lines: list[socket.socket] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(str(socket_path(folder, UNIT)))
        door.listen(8)
        door.settimeout(DEADLINE_S)

        def answer() -> None:
            line, _ = door.accept()
            lines.append(line)
            socket.send_fds(line, [text], files)
            sent.set()

        thread = threading.Thread(target=answer)
        thread.start()
        write_card(folder, UNIT, facts)
        yield sent
        thread.join(DEADLINE_S)
        for line in lines:
            line.close()


def follows(engine: MiniEngine) -> bool:
    watch = share_of(engine)._watch
    return watch is not None and watch._thread.is_alive()


def changes_of(told: dict[str, Any], name: str) -> dict[str, object]:
    (group,) = told["groups"]
    if name in GROUP_CHANGES:
        return {"groups": [group | GROUP_CHANGES[name]]}
    if name in FORMAT_TOKENS:
        format_id = re.sub(r"\d+\.", f"{FORMAT_TOKENS[name]}.", group["format_id"], count=1)
        return {"groups": [group | {"format_id": format_id}]}
    return {"groups": [group] * GROUPS[name]} if name in GROUPS else CHANGES[name]


def meet(make_engine: Make, folder: Path, name: str) -> MiniEngine:
    """Starts an engine and an impostor that sends it the invalid card `name`. Waits until the engine has received the
    card, and returns the engine."""
    engine = make_engine(**settings_of(folder))
    share = share_of(engine)
    (_, facts), *_ = read_cards(folder)
    told = json.loads(share._card.encode()) | {"unit": UNIT}
    text = TEXTS[name] if name in TEXTS else json.dumps(told | changes_of(told, name)).encode()
    files = share._files + share._files[:1] * ("disk" in CHANGES.get(name, {}))
    with impostor(folder, facts, text, files) as sent:
        assert sent.wait(DEADLINE_S)
        watch = share._watch
        assert watch is not None
        wait_for(lambda: UNIT in watch._again_s or not watch._thread.is_alive())
    return engine


@pytest.mark.parametrize("name", [*GROUP_CHANGES, *FORMAT_TOKENS, *CHANGES, *GROUPS, *TEXTS])
def test_a_card_that_is_none_is_named_and_left(
    make_engine: Make, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    engine = meet(make_engine, tmp_path / "run", name)
    assert f"unit {UNIT} is not shared with: " in caplog.text
    assert follows(engine)
    assert share_of(engine).joined == 0


def test_control_a_card_that_is_not_checked_ends_the_thread(
    make_engine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card_module, "_check", lambda card: None)
    engine = meet(make_engine, tmp_path / "run", "runs of texts")
    wait_for(lambda: not follows(engine))


def test_an_engine_that_has_met_a_bad_card_shares_with_others(make_engine: Make, tmp_path: Path) -> None:
    one = meet(make_engine, tmp_path / "run", "runs of several lengths")
    other = make_engine(**settings_of(tmp_path / "run"))
    one.run(make_request(PROMPT, "one"))
    wait_for(lambda: knows(other, 5))
    assert other.run(make_request(PROMPT, "two")) == 20


@pytest.mark.parametrize(
    "text", ["[" * 60_000, "[]", '{"fingerprint":[1]}', '{"pid":{}}', "\0", "", " " * MOST_FACTS_BYTES + "{}"]
)
def test_a_file_that_is_no_units_is_left(make_engine: Make, tmp_path: Path, text: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    card_path(folder, UNIT).write_text(text)
    one, other = make_engine(**settings_of(folder)), make_engine(**settings_of(folder))
    wait_for(lambda: share_of(one).joined == share_of(other).joined == 1)


def test_a_unit_without_room_for_its_file_leaves_nothing(
    make_engine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, facts: str) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        engine = make_engine(**settings_of(folder))
    assert "nothing is shared with other units: [Errno 28] No space left" in caplog.text
    assert list(folder.iterdir()) == []
    assert engine.run(make_request(PROMPT, "one")) == 0


def test_what_killed_units_left_goes_and_what_starts_stays(make_engine: Make, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    old, new = (folder / ("1" * 16 + suffix) for suffix in (".sock", ".new"))
    starts = folder / ("2" * 16 + ".sock")
    for path in (old, new, starts):
        path.touch()
    for path in (old, new):
        os.utime(path, (0, 0))
    make_engine(**settings_of(folder))
    assert not old.exists()
    assert not new.exists()
    assert starts.exists()


def test_a_unit_without_descriptors_does_not_spin(make_engine: Make, tmp_path: Path) -> None:
    share = share_of(make_engine(**settings_of(tmp_path / "run")))
    watch = share._watch
    asked: list[None] = []
    assert watch is not None

    class Full:
        def accept(self) -> None:
            asked.append(None)
            raise OSError(errno.EMFILE, "Too many open files")

    door, watch._door = watch._door, Full()  # type: ignore[assignment]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect(str(socket_path(tmp_path / "run", share._card.unit)))
        wait_for(lambda: len(asked) > 0)
        before = len(asked)
        time.sleep(0.5)
        assert len(asked) - before < 50
    watch._door = door
    assert watch._thread.is_alive()


@pytest.mark.parametrize(
    ("slots_offset", "stride"), [(0, 1 << 62), (4096, 4096), (0, 8192), (0, (1 << 62) + 4096)]
)
def test_a_pool_without_room_for_its_boards_slots_is_refused(slots_offset: int, stride: int) -> None:
    """An engine refuses a peer whose pool is too small for the slots of its board. In one case the stride is so large
    that the address of the last slot overflows to an address inside the pool."""
    slots = 5
    board, pool = c_ext.SlotBoard(slots), os.memfd_create("pool", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(pool, slots * 4096)
        fcntl.fcntl(pool, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        directory = c_ext.PeerDirectory()
        place = ((board.fd, board.bytes), (pool, slots * 4096, slots_offset, 4096, 1, stride))
        with pytest.raises(ClosedError, match="no room for the slots of its board"):
            directory.add(*place)
        directory.add((board.fd, board.bytes), (pool, slots * 4096, 0, 4096, 1, 4096))
    finally:
        os.close(pool)


def test_a_peers_hanging_disk_keeps_nobody_from_closing(
    make_engine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, answers = threading.Event(), threading.Event()

    def hang(*arguments: Any) -> Any:
        hangs.set()
        answers.wait(DEADLINE_S)
        return open_slab(*arguments)

    monkeypatch.setattr(share_module, "open_slab", hang)
    engines = [
        make_engine(
            **settings_of(tmp_path / "run"),
            **{"disk.folders": str(tmp_path / name), "disk.bytes_per_folder": 4 << 20},
        )
        for name in ("a", "b")
    ]
    try:
        assert hangs.wait(DEADLINE_S)
        closing = [threading.Thread(target=share_of(engine).close) for engine in engines]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(DEADLINE_S / 2)
        assert not any(thread.is_alive() for thread in closing)
        assert all(share_of(engine).joined == 0 for engine in engines)
    finally:
        answers.set()
    for engine in engines:
        assert engine.run(make_request(PROMPT, "one")) in (0, 20)
        assert share_of(engine).joined == 0, "it joins nobody once it has closed"
