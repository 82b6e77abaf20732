"""Tests of a plugin's calls to its unit, and of the unit's responses to calls that it cannot carry out."""

from __future__ import annotations

import os
import select
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexkv.cache.base import HUB
from flexkv.cache.keys import named_mark
from flexkv.errors import PluginCallError
from flexkv.facts.keys import Keys
from flexkv.plugins import client, server
from flexkv.plugins.client import CachedPages, connect
from flexkv.plugins.server import MOST_CONNECTIONS
from flexkv.plugins.unit_socket import MOST_TOKENS, decoded, encoded, socket_name
from flexkv.unit.live_unit import LiveUnit
from flexkv.unit.plugin_calls import MOST_WAITING
from tests.unit.plugins import plugin_units
from tests.unit.plugins.plugin_folders import DEADLINE_S, Lines, plugin, wait_for
from tests.unit.plugins.plugin_units import (
    BLOCK_TOKENS,
    KEYS,
    PAGES,
    PROMPT,
    STORED,
    Asking,
    Build,
    drive,
    store_prompt,
)

MANY_CALLS, FEW_ANSWERS = 20_000, 4096


def test_status_says_what_the_unit_is_without_a_step(unit: LiveUnit) -> None:
    drive(unit, lambda: unit.plugins is not None and unit.plugins.calls._status["host_slots_used"] == STORED)
    with connect(socket_name(unit.unit_id)) as plugins_end:
        status = plugins_end.status()
    age_s = status.pop("age_s")
    assert age_s >= 0
    assert status == unit.status()
    assert status["unit"] == unit.unit_id.hex()
    assert (status["state"], status["tiers"], status["stored_pages"]) == (
        "usable",
        ["host", "disk"],
        STORED,
    )


def test_lookup_counts_pages_and_changes_nothing(unit: LiveUnit, ask: Asking) -> None:
    before = unit.manager.stats()
    assert ask("lookup", PROMPT) == [CachedPages(PAGES, STORED, STORED, STORED)]
    assert ask("lookup", PROMPT[: 2 * BLOCK_TOKENS + 1]) == [CachedPages(2, 2, 2, 2)]
    assert ask("lookup", []) == [CachedPages(0, 0, 0, 0)]
    unit.manager.tiers[HUB].forget(0, KEYS[1:2])
    assert ask("lookup", PROMPT) == [CachedPages(PAGES, STORED, STORED, STORED - 1)]
    assert unit.manager.stats().lookups == before.lookups


def test_prefetch_brings_pages_from_disk_and_holds_none_of_them(unit: LiveUnit, ask: Asking) -> None:
    unit.manager.tiers[HUB].forget(0, KEYS)
    assert ask("lookup", PROMPT) == [CachedPages(PAGES, STORED, STORED, 0)]
    assert ask("prefetch", PROMPT) == [CachedPages(PAGES, STORED, STORED, STORED)]
    assert unit.plugins is not None
    assert not unit.plugins.calls.busy
    assert unit.manager.held_slots(0) == set()
    unit.manager.check_integrity()
    assert unit.manager.match("a request", [KEYS], 0).blocks == STORED, "a request finds them in host memory"
    unit.manager.release("a request")
    assert ask("prefetch", PROMPT) == [CachedPages(PAGES, STORED, STORED, STORED)], (
        "there is nothing to fetch"
    )


def test_control_pages_that_a_prefetch_does_not_release_are_seen(
    unit: LiveUnit, ask: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit.manager.tiers[HUB].forget(0, KEYS)
    with monkeypatch.context() as broken:
        broken.setattr(unit.manager, "release", lambda request_id: None)
        ask("prefetch", PROMPT)
        assert len(unit.manager.held_slots(0)) == STORED
    unit.manager.release("flexkv plugin 1")
    assert unit.manager.held_slots(0) == set()


def test_forget_makes_a_prompt_a_miss_in_all_tiers(unit: LiveUnit, ask: Asking) -> None:
    assert ask("forget", PROMPT[: 2 * BLOCK_TOKENS]) == 2
    assert ask("lookup", PROMPT) == [CachedPages(PAGES, STORED - 2, 0, STORED - 2)]
    assert unit.manager.match("a request", [KEYS], 0).blocks == 0


def test_erase_namespace_leaves_pages_of_other_namespaces(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin(tmp_path / "plugins", "scheduler_sleeps")
    made = build()
    marked = KEYS.copy()
    marked[:2, -2:] = np.frombuffer(named_mark("tenant"), np.uint8)
    monkeypatch.setattr(plugin_units, "KEYS", marked)
    store_prompt(made)
    asking = Asking(made)
    assert asking("erase_namespace", "another") == 0
    assert asking("erase_namespace", "tenant") == 2
    assert asking("lookup", PROMPT) == [CachedPages(PAGES, STORED - 2, 0, STORED - 2)]
    asking.close()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no such call": (
        {"call": "evict"},
        "no such call; there are status, lookup, prefetch, forget, erase_namespace, pin, unpin",
    ),
    "an endless pin": ({"call": "pin", "tokens": [1], "seconds": 3601}, "seconds=3601; allowed are numbers"),
    "a pin without an end": ({"call": "pin", "tokens": [1]}, "seconds=None; allowed are numbers"),
    "no pin": ({"call": "pin", "tokens": [1], "seconds": True}, "seconds=True; allowed are numbers"),
    "no tokens": ({"call": "lookup"}, "expected 'tokens', a list of whole numbers"),
    "other tokens": ({"call": "lookup", "tokens": [1, True]}, "expected 'tokens', a list of whole numbers"),
    "many tokens": (
        {"call": "lookup", "tokens": [1] * (MOST_TOKENS + 1)},
        f"allowed: {MOST_TOKENS} and text",
    ),
    "a salt": ({"call": "lookup", "tokens": [1], "salt": "x"}, "no salt here"),
    "no text as salt": ({"call": "lookup", "tokens": [1], "salt": 1}, "and text"),
    "no namespace": (
        {"call": "erase_namespace", "namespace": ""},
        "namespace=''; allowed is text of 1 to 256 bytes",
    ),
    "no text as namespace": (
        {"call": "erase_namespace"},
        "namespace=None; allowed is text of 1 to 256 bytes",
    ),
    "no UTF-8 as namespace": (
        {"call": "erase_namespace", "namespace": "\udcff"},
        "allowed is text of 1 to 256 bytes",
    ),
    "an endless wait": (
        {"call": "status", "deadline_s": 1e9},
        "deadline_s=1000000000.0; allowed are numbers",
    ),
    "no number": ({"call": "status", "deadline_s": "x"}, "deadline_s='x'; allowed are numbers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_call_that_makes_no_sense_is_refused_with_the_reason(case: str, unit: LiveUnit) -> None:
    message, reason = REFUSED[case]
    with connect(socket_name(unit.unit_id), DEADLINE_S) as plugins_end:
        plugins_end._connection.sendall(encoded(message))
        reply = decoded(plugins_end._line(time.monotonic() + DEADLINE_S))
        assert reason in reply["error"]
        assert plugins_end.status()["state"] == "usable", "the connection goes on"


@pytest.mark.parametrize("line", [b"no json\n", b"[1]\n", b"{" * 100_000 + b"\n", b"\xff\n"])
def test_what_is_no_message_is_refused(line: bytes, unit: LiveUnit) -> None:
    with connect(socket_name(unit.unit_id), DEADLINE_S) as plugins_end:
        plugins_end._connection.sendall(line)
        reply = decoded(plugins_end._line(time.monotonic() + DEADLINE_S))
        assert "a message that is" in reply["error"]
        assert plugins_end.status()["state"] == "usable"


def test_calls_wait_for_a_step_until_their_deadline(unit: LiveUnit) -> None:
    """If the engine takes no step, a plugin's call ends at its deadline, because a unit carries out calls only in the
    engine's steps."""
    with connect(socket_name(unit.unit_id), 0.05) as plugins_end:
        with pytest.raises(PluginCallError, match="lookup: not carried out in time: the engine takes calls"):
            plugins_end.lookup(PROMPT)
        assert plugins_end.status()["state"] == "usable"
    assert unit.plugins is not None
    unit.poll()
    assert not unit.plugins.calls.busy, "a call that was given up is not carried out"


def test_a_unit_with_host_memory_alone_steps_on_while_calls_wait(build: Build, tmp_path: Path) -> None:
    """A unit is busy while calls wait, so that an engine without requests takes another step. A step carries out one
    call."""
    plugin(tmp_path / "plugins", "scheduler_sleeps")
    unit = build()
    assert not unit.has_tiers
    assert not unit.busy, "the control"
    ends = [connect(socket_name(unit.unit_id), DEADLINE_S) for _ in range(2)]
    for plugins_end in ends:
        plugins_end._connection.sendall(encoded({"call": "lookup", "tokens": PROMPT}))
    assert unit.plugins is not None
    calls = unit.plugins.calls
    wait_for(lambda: len(calls._waiting) == 2, "both calls arrive")
    unit.poll()
    assert unit.busy
    unit.poll()
    assert not unit.busy
    for plugins_end in ends:
        plugins_end.close()


def test_a_prefetch_that_nobody_waits_for_holds_nothing(unit: LiveUnit) -> None:
    unit.manager.tiers[HUB].forget(0, KEYS)
    plugins_end = connect(socket_name(unit.unit_id), DEADLINE_S)
    plugins_end._connection.sendall(encoded({"call": "prefetch", "tokens": PROMPT}))
    assert unit.plugins is not None
    calls = unit.plugins.calls
    wait_for(lambda: calls._waiting, "the call arrives")
    call = calls._waiting[0].call
    calls.run()
    plugins_end.close()
    wait_for(lambda: call.is_over or not calls._prefetches, "the server sees that the plugin is gone")
    drive(unit, lambda: not calls.busy and not unit.driver.busy)
    assert unit.manager.held_slots(0) == set()


def test_more_calls_than_may_wait_are_refused(unit: LiveUnit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexkv.unit.plugin_calls.MOST_WAITING", 2)
    clients = [connect(socket_name(unit.unit_id), DEADLINE_S) for _ in range(3)]
    assert unit.plugins is not None
    for number, one in enumerate(clients[:2], 1):
        one._connection.sendall(encoded({"call": "lookup", "tokens": PROMPT}))
        wait_for(lambda number=number: len(unit.plugins.calls._waiting) == number, "it waits")  # type: ignore[misc]
    with pytest.raises(PluginCallError, match="2 calls wait already; try again"):
        clients[2].lookup(PROMPT)
    assert MOST_WAITING == 2 * MOST_CONNECTIONS
    for one in clients:
        one.close()


def test_more_connections_than_allowed_wait(unit: LiveUnit) -> None:
    name = socket_name(unit.unit_id)
    clients = [connect(name, DEADLINE_S) for _ in range(MOST_CONNECTIONS)]
    assert all(one.status() for one in clients)
    with connect(name, 0.1) as late, pytest.raises(PluginCallError, match="timed out"):
        late.status()
    for one in clients:
        one.close()
    with connect(name, DEADLINE_S) as later:
        assert later.status()["state"] == "usable"


def ask_without_reading(unit: LiveUnit) -> int:
    """Sends calls without reading the answers, until the unit accepts no more calls. Returns the number of bytes of
    answers that wait in the unit.
    """
    call = encoded({"call": "status"})
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as deaf:
        deaf.connect("\0" + socket_name(unit.unit_id))
        deaf.setblocking(False)
        sent, waits_s = 0, time.monotonic() + 1.0
        while sent < MANY_CALLS and time.monotonic() < waits_s:
            try:
                deaf.send(call)
            except BlockingIOError:
                time.sleep(0.01)
                continue
            sent += 1
            waits_s = time.monotonic() + 1.0
        assert unit.plugins is not None
        assert unit.plugins._server is not None
        (one,) = unit.plugins._server._connections.values()
        return len(one.unsent)


def test_a_plugin_that_reads_no_answers_gets_no_more_of_them(unit: LiveUnit) -> None:
    assert ask_without_reading(unit) < FEW_ANSWERS


def test_control_answers_that_nobody_reads_pile_up(unit: LiveUnit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.UnitServer, "_go_on", server.UnitServer._begin_call)
    monkeypatch.setattr(server.UnitServer, "_wanted", lambda self, one: select.POLLIN | select.POLLOUT)
    assert ask_without_reading(unit) > FEW_ANSWERS


def test_an_error_in_a_call_ends_neither_step_nor_connection(
    unit: LiveUnit, ask: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(group: int, keys: Keys) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as broken:
        broken.setattr(unit.manager, "present", fails)
        with pytest.raises(PluginCallError, match="lookup: MemoryError: no room"):
            ask("lookup", PROMPT)
    assert ask("lookup", PROMPT)[0].cached == STORED


def test_another_user_is_turned_away(unit: LiveUnit, log: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    name = socket_name(unit.unit_id)
    monkeypatch.setattr(server, "is_same_user", lambda connection: False)
    with connect(name, DEADLINE_S) as plugins_end, pytest.raises(PluginCallError):
        plugins_end.status()
    log.wait_for("1 connections to the unit's socket were turned away")
    for _ in range(5):  # more attempts must add no line to the log
        with connect(name, DEADLINE_S) as again, pytest.raises(PluginCallError):
            again.status()
    assert log.count("were turned away") == 1
    monkeypatch.undo()
    monkeypatch.setattr(client, "is_same_user", lambda connection: False)
    with pytest.raises(PluginCallError, match="a process of another user listens there"):
        connect(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_the_kernel_tells_the_user(unit: LiveUnit) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setresuid(65534, 65534, 65534)
            with connect(socket_name(unit.unit_id), 5.0) as plugins_end:
                plugins_end.status()
            os.write(write, b"answered")
        except BaseException as error:
            os.write(write, repr(error).encode()[:500])
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    told = os.read(read, 1000)
    os.close(read)
    os.close(write)
    assert b"another user" in told
