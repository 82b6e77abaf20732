"""Peers that are stopped, killed, reset, incompatible or hostile may cost hits, but never make an answer wrong."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flexkv.errors import ContractError, DiskError, GeometryError
from flexkv.peers import watch as watch_module
from flexkv.peers.card import PROTOCOL, UnitCard, decode_card, name_of
from flexkv.peers.pool_reader import OUTCOMES
from flexkv.peers.runtime_folder import read_cards, remove_unit, runtime_folder, socket_path, write_card
from flexkv.peers.share import MOST_REFUSED, PeerShare
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.vllm_objects import make_request
from tests.unit.peers.live_engines import PROMPT, Make, knows, live_tiers, settings_of, share_of, wait_for


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def with_a_prompt(make_engine: Make, folder: Path, **more: object) -> tuple[MiniEngine, MiniEngine]:
    """Starts an engine that computes PROMPT, and another engine, and waits until the other one has learned of these
    pages. Returns the two engines."""
    one, other = make_engine(**settings_of(folder) | more), make_engine(**settings_of(folder) | more)
    one.run(make_request(PROMPT, "one"))
    wait_for(lambda: knows(other, 5))
    return one, other


def test_a_reset_peer_is_left_and_serves_nothing(make_engine: Make, folder: Path) -> None:
    one, other = with_a_prompt(make_engine, folder)
    one.unit.manager.reset()
    wait_for(lambda: knows(other, 0))
    one.forget()
    # stores pages of the new weights, which other units do not have yet
    one.run(make_request(PROMPT, "again"))
    assert other.run(make_request(PROMPT, "two")) == 0
    assert live_tiers(one)[0].down


HANGS_S = 4.0


@pytest.mark.parametrize("waits", [False, True], ids=["", "control"])
def test_a_reset_waits_for_no_thread_of_sharing(
    make_engine: Make, folder: Path, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """A reset does not wait for the thread that follows peers, even if that thread takes long to end. In the control
    the reset waits until the thread has ended."""
    one, other = with_a_prompt(make_engine, folder)
    manager, go_on, close = one.unit.manager, threading.Event(), watch_module.PeerWatch.close

    def hang(watch: watch_module.PeerWatch) -> None:
        go_on.wait(HANGS_S)
        close(watch)

    monkeypatch.setattr(watch_module.PeerWatch, "close", hang)
    if waits:
        monkeypatch.setattr(PeerShare, "retire", PeerShare.close)
    begun_s = time.monotonic()
    manager.begin_reset()
    manager.poll_reset()
    assert (time.monotonic() - begun_s < HANGS_S / 2) != waits
    assert manager.resets != waits
    assert live_tiers(one)[0].down, "nothing of peers is served"
    go_on.set()

    def has_ended() -> bool:
        manager.poll_reset()
        return not manager.resets

    wait_for(has_ended)
    if not waits:
        wait_for(lambda: knows(other, 0))


def test_pages_evicted_after_the_lookup_are_computed(
    make_engine: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = with_a_prompt(make_engine, folder)
    # with this patch, `other` does not learn of the eviction
    monkeypatch.setattr(other.unit.manager, "_followers", [])
    one.unit.manager.hub.evict(0, 3)
    request = make_request(PROMPT, "two")
    other.add(request)
    other.end_load("two")
    other.step()
    other.check("two")
    outcomes = dict(zip(OUTCOMES, live_tiers(other)[0]._reader.outcomes.tolist(), strict=True))
    assert (outcomes["copied"], outcomes["absent"] + outcomes["changed"]) == (2, 3)


def test_a_peers_damaged_page_is_computed_where_memory_is_verified(make_engine: Make, folder: Path) -> None:
    one, other = with_a_prompt(make_engine, folder, **{"host.verify": True})
    pool = one.unit.pool
    for slot in range(8):
        pool.slot(slot)[5] ^= 1
    request = make_request(PROMPT, "two")
    other.add(request)
    other.end_load("two")
    other.step()
    other.check("two")
    assert share_of(other).peers()[0]["digest"] > 0


def test_control_without_digests_a_damaged_page_is_taken(make_engine: Make, folder: Path) -> None:
    one, other = with_a_prompt(make_engine, folder)
    for slot in range(8):
        one.unit.pool.slot(slot)[5] ^= 1
    other.add(make_request(PROMPT, "two"))
    other.end_load("two")
    other.step()
    assert other.wrong("two") != []


def test_pages_on_disk_stay_known_after_their_engines_end(make_engine: Make, tmp_path: Path) -> None:
    def start(name: str) -> MiniEngine:
        disk = {"disk.folders": str(tmp_path / name), "disk.bytes_per_folder": 4 << 20}
        return make_engine(**settings_of(tmp_path / "run", "disk") | disk)

    one, other = start("a"), start("b")
    one.run(make_request(PROMPT, "one"))
    wait_for(lambda: knows(other, 5))
    one.close()
    wait_for(lambda: share_of(other).joined == 0)
    assert knows(other, 5)
    assert other.run(make_request(PROMPT, "two")) == 20
    again = start("a")  # starts a new unit, which finds the same pages in its folder
    wait_for(lambda: share_of(other).joined == 1 and knows(other, 5))
    assert again.run(make_request(PROMPT, "three")) == 20


def test_the_host_memory_of_a_peer_that_ended_is_forgotten(make_engine: Make, folder: Path) -> None:
    one, other = with_a_prompt(make_engine, folder)
    one.close()
    wait_for(lambda: knows(other, 0))
    assert list(folder.glob("*")) != []
    other.close()
    assert list(folder.glob("*")) == []


def test_a_stopped_unit_keeps_nobody_waiting(
    make_engine: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped unit makes no other unit wait. The socket of a stopped process still accepts connections, but no answer
    comes."""
    monkeypatch.setattr(watch_module, "ANSWER_S", 0.2)
    one = make_engine(**settings_of(folder))
    (_, facts), *_ = read_cards(folder)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stopped:
        stopped.bind(str(socket_path(folder, "0" * 16)))
        stopped.listen(8)
        write_card(folder, "0" * 16, facts)
        other = make_engine(**settings_of(folder))
        one.run(make_request(PROMPT, "one"))
        wait_for(lambda: knows(other, 5))
        assert other.run(make_request(PROMPT, "two")) == 20
        wait_for(lambda: "0" * 16 not in share_of(other)._watch._peers)  # type: ignore[union-attr]
        assert (folder / ("0" * 16 + ".json")).exists(), "it may go on"


def test_the_files_of_a_killed_unit_are_removed(make_engine: Make, folder: Path) -> None:
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(socket_path(folder, "0" * 16)))
        dead.listen(1)
    write_card(folder, "0" * 16, {"fingerprint": "another"})
    make_engine(**settings_of(folder))
    wait_for(lambda: not (folder / ("0" * 16 + ".json")).exists())
    assert not socket_path(folder, "0" * 16).exists()


@pytest.mark.parametrize("mode", [0o755, 0o720])
def test_a_folder_that_others_may_use_is_not_used(
    make_engine: Make, folder: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir()
    folder.chmod(mode)
    engine = make_engine(**settings_of(folder))
    assert "nobody else may use" in caplog.text
    assert list(folder.iterdir()) == []
    assert engine.run(make_request(PROMPT, "one")) == 0


def test_a_folder_or_file_of_another_user_is_not_used(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    folder.mkdir(mode=0o700)
    write_card(folder, "0" * 16, {"pid": 1})
    assert len(list(read_cards(folder))) == 1
    os.chown(folder / ("0" * 16 + ".json"), 12345, -1)
    assert list(read_cards(folder)) == []
    os.chown(folder, 12345, -1)
    with pytest.raises(Exception, match="nobody else may use"):
        runtime_folder(str(folder))


def card_of(engine: MiniEngine) -> UnitCard:
    return share_of(engine)._card


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"weights": "ab" * 32}, "its weights are others"),
        ({"protocol": PROTOCOL + 1}, "it speaks version"),
        ({"protocol": 1}, "it speaks version 1, this one 2"),
    ],
)
def test_units_that_may_not_share_are_named(
    make_engine: Make, folder: Path, change: dict[str, object], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(**settings_of(folder))
    share = share_of(engine)
    assert share.wants(card_of(engine).short())
    with caplog.at_level(logging.WARNING):
        assert not share.wants(card_of(engine).short() | {"pid": 7} | change)
    (why,) = share.refused.values()
    assert reason in why
    assert reason in caplog.text
    assert not share.wants(card_of(engine).short() | {"fingerprint": "00" * 32}), "another model"
    assert len(share.refused) == 1, "another model is nothing to warn of"


def test_refused_units_do_not_add_up(make_engine: Make, folder: Path) -> None:
    engine = make_engine(**settings_of(folder))
    share, facts = share_of(engine), card_of(engine).short()
    for pid in range(MOST_REFUSED + 3):
        assert not share.wants(facts | {"pid": pid, "weights": "others"})
    assert list(share.refused) == [name_of(facts | {"pid": pid}) for pid in range(3, MOST_REFUSED + 3)]


@pytest.mark.parametrize("leaves", [True, False], ids=["closed", "killed"])
def test_a_refusal_is_forgotten_when_its_unit_has_ended(
    make_engine: Make, folder: Path, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "ANSWER_S", 0.2)
    share = share_of(make_engine(**settings_of(folder)))
    unit = "d" * 16
    write_card(folder, unit, share._card.short() | {"unit": unit, "pid": 7, "protocol": PROTOCOL + 1})
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(str(socket_path(folder, unit)))
        door.listen(8)
        wait_for(lambda: list(share.refused) == ["7 (dddddddd)"])
        at_s = watch_of(share)._scan_at_s
        wait_for(lambda: watch_of(share)._scan_at_s > at_s + 1)
        assert list(share.refused) == ["7 (dddddddd)"], "control: it runs"
        if leaves:
            remove_unit(folder, unit)
    wait_for(lambda: not share.refused)


def watch_of(share: PeerShare) -> watch_module.PeerWatch:
    assert share._watch is not None
    return share._watch


def test_an_upgraded_peer_is_refused_and_its_pages_are_forgotten(make_engine: Make, folder: Path) -> None:
    """A unit refuses a peer that restarts with the next version of the peers' protocol, and forgets the pages that it
    knew of this peer."""
    one, other = make_engine(**settings_of(folder)), make_engine(**settings_of(folder))
    one.run(make_request(PROMPT, "one"))
    wait_for(lambda: knows(other, 5))
    card = card_of(one)
    one.close()
    unit = "e" * 16
    write_card(folder, unit, card.short() | {"unit": unit, "protocol": PROTOCOL + 1})
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(str(socket_path(folder, unit)))
        door.listen(8)
        wait_for(lambda: bool(share_of(other).refused))
        (why,) = share_of(other).refused.values()
        assert why == f"it speaks version {PROTOCOL + 1}, this one {PROTOCOL}"
        wait_for(lambda: knows(other, 0))
        assert share_of(other).joined == 0
        assert other.run(make_request(PROMPT, "two")) == 0


def test_units_of_two_containers_with_one_process_number_are_told_apart(
    make_engine: Make, folder: Path
) -> None:
    share = share_of(make_engine(**settings_of(folder)))
    facts = share._card.short() | {"pid": 1}
    assert not share.wants(facts | {"unit": "a" * 16, "weights": "others"})
    assert not share.wants(facts | {"unit": "b" * 16, "protocol": 0})
    share.end_refusal(name_of(facts | {"unit": "b" * 16}))
    assert share.refused == {"1 (aaaaaaaa)": "its weights are others"}


def test_a_unit_of_a_version_whose_file_names_no_unit_is_named_by_its_file(
    make_engine: Make, folder: Path
) -> None:
    engine = make_engine(**settings_of(folder))
    share = share_of(engine)
    facts = {key: value for key, value in share._card.short().items() if key != "unit"}
    write_card(folder, "c" * 16, facts | {"pid": 1, "protocol": 1})
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(str(socket_path(folder, "c" * 16)))
        door.listen(1)
        wait_for(lambda: bool(share.refused))
    assert list(share.refused) == ["1 (cccccccc)"]


def test_another_format_is_refused_under_an_engines_own_keys(make_engine: Make, folder: Path) -> None:
    engine = make_engine(**settings_of(folder))
    share, card = share_of(engine), card_of(engine)
    (group,) = card.groups
    for other in (
        replace(group, block_tokens=group.block_tokens * 2),
        replace(group, format_id=group.format_id.replace("HND", "NHD") + "x"),
        replace(group, rule="window", reach=3),
        replace(group, signature="ab"),
    ):
        share.refused.clear()
        with pytest.raises((DiskError, GeometryError)):
            share._join(replace(card, unit="x", pid=7, groups=(other,)), [0, 0])
        assert list(share.refused) == ["7 (x)"]
        assert share.joined == 0


def test_a_card_that_is_none_is_an_error() -> None:
    for text in (b"", b"{}", b"[]", b'{"protocol":2}', b"\xff", b'{"protocol":2,"host":null,"disk":null}'):
        with pytest.raises(ContractError):
            decode_card(text)


def test_a_card_of_an_earlier_version_is_named(make_engine: Make, folder: Path) -> None:
    told = json.loads(card_of(make_engine(**settings_of(folder))).encode())
    with pytest.raises(ContractError, match="of another version than 2"):
        decode_card(json.dumps(told | {"protocol": 1}).encode())


def test_cards_survive_their_way(make_engine: Make, folder: Path) -> None:
    card = card_of(make_engine(**settings_of(folder)))
    there = decode_card(card.encode())
    assert there == card
    assert np.array_equal(there.disk_groups[0].runs[0], card.disk_groups[0].runs[0])


def test_an_unusable_descriptor_leaves_the_unit_serving(make_engine: Make, folder: Path) -> None:
    """A unit still serves if a peer sends an unusable descriptor: that of an ordinary file instead of that of its
    board."""
    engine = make_engine(**settings_of(folder))
    share, card = share_of(engine), card_of(engine)
    with open("/dev/null") as nothing, pytest.raises(Exception, match="expected a sealed memfd"):
        share._join(replace(card, unit="x"), [nothing.fileno(), nothing.fileno()])
    assert share.joined == 0
    assert isinstance(share, PeerShare)
    assert engine.run(make_request(PROMPT, "one")) == 0
