"""A unit without an engine, with plugins: what they may ask, what it holds, and that nothing outlives it."""

from __future__ import annotations

import os
import select
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexkv.cache.base import HUB
from flexkv.config import load_config
from flexkv.errors import PluginCallError
from flexkv.facts.keys import Keys
from flexkv.facts.ranks import GroupFacts, KvGroup, RankFacts, UnitOwner
from flexkv.observe import Counters
from flexkv.plugins import client, server
from flexkv.plugins.client import CachedPages, connect
from flexkv.plugins.server import MOST_CONNECTIONS
from flexkv.plugins.unit_socket import MOST_TOKENS, decoded, encoded, socket_name
from flexkv.transfer.graph import OpResult, OpStatus
from flexkv.unit.build import build_unit
from flexkv.unit.live_unit import LiveUnit
from flexkv.unit.plugin_calls import MOST_WAITING, PluginCalls
from tests.unit.plugins.plugin_folders import DEADLINE_S, Held, Lines, plugin, processes_of, wait_for

STRIPE = 4096
BLOCK_TOKENS = 4
PAGES = 6
KEYS = np.random.default_rng(0).integers(0, 256, (PAGES, 16), dtype=np.uint8)
PROMPT = list(range(BLOCK_TOKENS * PAGES))
MANY_CALLS, FEW_ANSWERS = 20_000, 4096
STORED = 4
"""Pages of the prompt that are stored."""


def keys_of(tokens: Sequence[int], salt: str) -> list[Keys]:
    if salt:
        raise PluginCallError("no salt here")
    return [KEYS[: len(tokens) // BLOCK_TOKENS]]


Build = Callable[..., LiveUnit]


@pytest.fixture
def build(tmp_path: Path, log: Lines) -> Iterator[Build]:
    before = Held()
    units: list[LiveUnit] = []

    def make(folder: Path | str | None = tmp_path / "plugins", **settings: object) -> LiveUnit:
        given: dict[str, object] = {"host.bytes": 1 << 20, "host.huge_pages": "off", "index.policy": "lru"}
        if folder is not None:
            given["plugins.folder"] = str(folder)
        config = load_config(given | {key.replace("__", "."): value for key, value in settings.items()}, {})
        run = np.array([[0, STRIPE, 0]], np.int64)
        ranks = {0: RankFacts(0, 0, 8, (GroupFacts(STRIPE, run, "a format"),))}
        owner = UnitOwner("a model", b"n" * 32, "unit0")
        units.append(build_unit(config, [KvGroup(BLOCK_TOKENS)], ranks, owner, prompt_keys=keys_of))
        units[-1].grow()
        return units[-1]

    yield make
    has_disks = any(unit.has_tiers for unit in units)
    while units:
        units[-1].close()
        units.pop().manager.check_integrity()
    assert processes_of(tmp_path / "plugins") == set()
    after = Held()
    assert after.threads == before.threads
    # The native core's lane to a disk keeps a descriptor until the last reference to its unit goes, after this.
    assert has_disks or after == before


@pytest.fixture
def unit(build: Build, tmp_path: Path) -> LiveUnit:
    """A unit with a disk, on which and in host memory the first pages of `PROMPT` are, and with a plugin."""
    plugin(tmp_path / "plugins", "scheduler_sleeps")
    (tmp_path / "disk").mkdir()
    made = build(disk__folders=str(tmp_path / "disk"), disk__bytes_per_folder="16MiB")
    store_prompt(made)
    return made


def store_prompt(made: LiveUnit) -> None:
    """Stores the first pages of `PROMPT`, and waits until they are on disk."""
    plan = made.manager.begin_store("store", 0, KEYS[:STORED], np.arange(STORED, dtype=np.int32), 0)
    assert plan.graph is not None
    (op,) = plan.graph.ops
    made.manager.complete(0, OpResult(op.op_id, OpStatus.OK, np.empty(0, np.int32), ""))
    drive(made, lambda: not made.driver.busy and made.driver.look_durable())


def drive(unit: LiveUnit, condition: Callable[[], object]) -> None:
    """Plays the engine's steps until `condition` is met."""

    def step() -> object:
        unit.poll()
        unit.expire_if_due(Counters())
        return condition()

    wait_for(step, "the engine's steps")


class Asking:
    """A client in a thread of its own, while this thread plays the engine."""

    def __init__(self, unit: LiveUnit) -> None:
        self._unit = unit
        self._pool = ThreadPoolExecutor(1)
        self.client = connect(socket_name(unit.unit_id), DEADLINE_S)

    def __call__(self, name: str, *arguments: Any) -> Any:
        answer: Future[Any] = self._pool.submit(getattr(self.client, name), *arguments)
        drive(self._unit, answer.done)
        return answer.result()

    def close(self) -> None:
        self.client.close()
        self._pool.shutdown()


@pytest.fixture
def ask(unit: LiveUnit) -> Iterator[Asking]:
    asking = Asking(unit)
    yield asking
    asking.close()


# --- calls ---


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


# --- pins ---


def evicts_all(unit: LiveUnit) -> int:
    """Evicts what may leave host memory; returns how many pages of the prompt are left there."""
    unit.manager.hub.evict(0, 10_000)
    unit.manager.check_integrity()
    return int(np.count_nonzero(unit.manager.tiers[HUB].present(0, KEYS)))


def test_a_pinned_prompt_stays_in_host_memory_until_it_is_unpinned(unit: LiveUnit, ask: Asking) -> None:
    assert ask("pin", PROMPT[: 3 * BLOCK_TOKENS], 600) == 3
    assert unit.status()["pinned_pages"] == 3
    assert evicts_all(unit) == 3
    assert unit.manager.match("a request", [KEYS[:3]], 0).blocks == 3
    unit.manager.release("a request")
    assert ask("unpin") == 3
    assert evicts_all(unit) == 0, "the control: nothing keeps them any more"


def test_a_pin_ends_with_its_time(unit: LiveUnit, ask: Asking) -> None:
    assert ask("pin", PROMPT, 0.01) == STORED
    drive(unit, lambda: not unit.manager.kept_pages)
    assert evicts_all(unit) == 0


def test_a_pin_ends_with_its_plugin(unit: LiveUnit, ask: Asking) -> None:
    other = Asking(unit)
    assert other("pin", PROMPT, 600) == STORED
    assert ask("pin", PROMPT[:BLOCK_TOKENS], 600) == 1
    other.close()
    drive(unit, lambda: unit.manager.kept_pages == 1)
    assert evicts_all(unit) == 1, "the other plugin's pin goes on"


def test_control_a_pin_that_outlives_its_plugin_is_seen(
    unit: LiveUnit, ask: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PluginCalls, "_end_pins", lambda self, ends: None)
    other = Asking(unit)
    other("pin", PROMPT, 600)
    other.close()
    ask("lookup", PROMPT)
    assert evicts_all(unit) == STORED
    monkeypatch.undo()


def test_pins_keep_a_share_of_host_memory_at_most(
    unit: LiveUnit, ask: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = unit.manager.hub.index.up_slots(0)
    monkeypatch.setattr("flexkv.unit.plugin_calls.PIN_SHARE", slots // 3)
    assert ask("pin", PROMPT, 600) == 3
    assert ask("pin", PROMPT, 600) == 0
    assert unit.manager.kept_pages == 3
    monkeypatch.setattr("flexkv.unit.plugin_calls.MOST_PINS", 1)
    with pytest.raises(PluginCallError, match="1 pins are held already"):
        ask("pin", PROMPT, 600)


def test_a_reset_ends_pins(unit: LiveUnit, ask: Asking) -> None:
    ask("pin", PROMPT, 600)
    unit.manager.reset()
    unit.manager.check_integrity()
    assert unit.manager.kept_pages == 0
    assert ask("unpin") == 0


def test_a_pin_does_not_prolong_a_time_to_live(
    unit: LiveUnit, ask: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask("forget", PROMPT) == STORED
    plan = unit.manager.begin_store("store", 0, KEYS[:2], np.arange(2, dtype=np.int32), 0, ttl_s=60)
    assert plan.graph is not None
    unit.manager.complete(0, OpResult(plan.graph.ops[0].op_id, OpStatus.OK, np.empty(0, np.int32), ""))
    assert ask("pin", PROMPT, 600) == 2
    monkeypatch.setattr(unit.manager.tables, "unix_s", lambda: time.time() + 60)
    unit.manager.expire()
    assert not unit.manager.tiers[HUB].present(0, KEYS).any()
    ask("unpin")
    assert unit.manager.free_slots(0) == unit.manager.hub.index.up_slots(0)


def test_a_plan_that_breaks_off_leaves_pins(unit: LiveUnit, ask: Asking) -> None:
    assert ask("pin", PROMPT, 600) == STORED
    with pytest.raises(MemoryError), unit.manager._broken_plans:
        raise MemoryError
    assert evicts_all(unit) == STORED


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no such call": (
        {"call": "evict"},
        "no such call; there are status, lookup, prefetch, forget, pin, unpin",
    ),
    "an endless pin": ({"call": "pin", "tokens": [1], "seconds": 3601}, "seconds=3601; allowed are numbers"),
    "no pin": ({"call": "pin", "tokens": [1], "seconds": True}, "seconds=True; allowed are numbers"),
    "no tokens": ({"call": "lookup"}, "expected 'tokens', a list of whole numbers"),
    "other tokens": ({"call": "lookup", "tokens": [1, True]}, "expected 'tokens', a list of whole numbers"),
    "many tokens": (
        {"call": "lookup", "tokens": [1] * (MOST_TOKENS + 1)},
        f"allowed: {MOST_TOKENS} and text",
    ),
    "a salt": ({"call": "lookup", "tokens": [1], "salt": "x"}, "no salt here"),
    "no text as salt": ({"call": "lookup", "tokens": [1], "salt": 1}, "and text"),
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
    """This engine does nothing: nobody carries a call out."""
    with connect(socket_name(unit.unit_id), 0.05) as plugins_end:
        with pytest.raises(PluginCallError, match="lookup: not carried out in time: the engine takes calls"):
            plugins_end.lookup(PROMPT)
        assert plugins_end.status()["state"] == "usable"
    assert unit.plugins is not None
    unit.poll()
    assert not unit.plugins.calls.busy, "a call that was given up is not carried out"


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
    """Sends calls and reads no answer until no more calls are taken; returns the bytes that the unit keeps for them."""
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
    for _ in range(5):  # another user may try for ever
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


def test_pages_are_written_before_a_unit_waits_for_its_plugins(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that ends may have seconds left, and a plugin that ignores its end takes them."""
    plugin(tmp_path / "plugins", "all_a")
    order: list[str] = []
    made = build()
    assert made.plugins is not None

    def noted(owner: Any, name: str, words: str) -> None:
        real = getattr(owner, name)

        def note(*arguments: Any) -> Any:
            order.append(words)
            return real(*arguments)

        monkeypatch.setattr(owner, name, note)

    noted(made.plugins, "begin_close", "begin_close")
    noted(made.driver, "close", "the tiers' close")
    noted(made.plugins, "close", "the plugins' close")
    made.close()
    assert order == ["begin_close", "the tiers' close", "the plugins' close"]


def test_a_unit_that_has_ended_is_named(build: Build, tmp_path: Path) -> None:
    plugin(tmp_path / "plugins", "all_sleeps")
    unit = build()
    plugins_end = connect(socket_name(unit.unit_id), DEADLINE_S)
    assert plugins_end.status()["state"] == "usable"
    unit.close()
    with pytest.raises(PluginCallError, match="status: "):
        plugins_end.status()
    with pytest.raises(PluginCallError, match="no unit listens at flexkv-unit-"):
        connect(socket_name(unit.unit_id))


def test_a_process_that_is_no_plugin_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLEXKV_PLUGIN_SOCKET", raising=False)
    with pytest.raises(PluginCallError, match="FLEXKV_PLUGIN_SOCKET is not set"):
        connect()


# --- a plugin's own process ---

ASKS = """
from flexkv.plugins.client import connect
with connect(deadline_s=60) as unit:
    print("state", unit.status()["state"])
    print("lookup", unit.lookup(list(range(24))))
"""


def test_a_plugin_asks_its_unit(build: Build, log: Lines, tmp_path: Path) -> None:
    plugin(tmp_path / "plugins", "scheduler_asks.py", ASKS)
    unit = build()
    drive(unit, lambda: log.count("ended with 0, and is not started again"))
    assert log.count("state usable") == 1
    assert log.count(f"lookup {[CachedPages(PAGES, 0, 0, 0)]}") == 1


EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "plugins" / "scheduler_warm_cache.py"


@pytest.mark.parametrize("prompts", [1, 0], ids=["a prompt", "control: no prompt"])
def test_the_example_warms_the_cache(prompts: int, build: Build, log: Lines, tmp_path: Path) -> None:
    """After a restart: the pages are on disk alone."""
    disk = {"disk__folders": str(tmp_path / "disk"), "disk__bytes_per_folder": "16MiB"}
    (tmp_path / "disk").mkdir()
    store_prompt(first := build(None, **disk))
    assert first.close()
    shutil.copy(EXAMPLE, plugin(tmp_path / "plugins", EXAMPLE.name))
    plugin(tmp_path / "plugins", "prompts.jsonl", f"{PROMPT}\n\n" * prompts)
    unit = build(**disk)
    drive(unit, lambda: log.count("ended with 0, and is not started again"))
    pages = STORED * prompts
    assert log.count(f"warmed {prompts} prompts: {pages} pages of them are in host memory") == 1
    assert int(unit.manager.tiers[HUB].present(0, KEYS).sum()) == pages


# --- what a unit holds ---


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_without_a_folder_nothing_is_started(build: Build) -> None:
    before = threads()
    unit = build(None)
    assert unit.plugins is None
    assert not {"flexkv-plugins", "flexkv-unit-api"} & (threads() - before)
    with pytest.raises(PluginCallError, match="no unit listens"):
        connect(socket_name(unit.unit_id))


def test_control_with_a_plugin_threads_are_started(build: Build, tmp_path: Path) -> None:
    plugin(tmp_path / "plugins", "scheduler_sleeps")
    before = threads()
    build()
    assert threads() - before >= {"flexkv-plugins", "flexkv-unit-api"}


@pytest.mark.parametrize("name", ["nowhere", "empty", "refused"])
def test_a_folder_without_plugins_starts_nothing_and_is_named(
    name: str, build: Build, log: Lines, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir(mode=0o755)
    plugin(tmp_path / "refused", "all_stranger", mode=0o4755)
    unit = build(tmp_path / name)
    assert unit.plugins is None
    assert unit.usable
    assert log.count(f"plugins.folder: {tmp_path / name} has no plugins that may run") == 1
    assert log.count("all_stranger is not run: it runs as another user") == (name == "refused")


def test_plugins_of_workers_alone_find_the_units_socket(build: Build, tmp_path: Path) -> None:
    plugin(tmp_path / "plugins", "worker_0_sleeps")
    unit = build()
    assert "flexkv-plugins" not in threads()
    with connect(socket_name(unit.unit_id), DEADLINE_S) as plugins_end:
        assert plugins_end.status()["state"] == "usable"


def test_a_socket_that_cannot_be_had_costs_the_calls_alone(
    build: Build, log: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_descriptor(*arguments: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "eventfd", no_descriptor)
    plugin(tmp_path / "plugins", "all_tells", "#!/bin/sh\necho here\n")
    assert build().usable
    log.wait_for("all_tells: here")
    assert log.count("plugins run without the unit's socket: [Errno 24] Too many open files") == 1


def test_control_a_unit_that_forgets_its_plugins_is_seen(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin(tmp_path / "plugins", "scheduler_sleeps")
    before = Held()
    unit = build()
    plugins, unit.plugins = unit.plugins, None
    unit.close()
    assert plugins is not None
    assert Held() != before
    wait_for(lambda: processes_of(tmp_path / "plugins"), "they run on")
    plugins.close()
    assert Held() == before


def test_nothing_is_asked_where_no_call_waits(unit: LiveUnit, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's part costs a look at the clock."""
    assert unit.plugins is not None
    monkeypatch.setattr("flexkv.unit.plugin_calls.STATUS_EVERY_S", 1e9)
    monkeypatch.setattr(PluginCalls, "_attempt", None)
    monkeypatch.setattr(type(unit), "status", None)
    unit.plugins.calls.run()
