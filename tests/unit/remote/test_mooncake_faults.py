"""Mooncake's servers and clients die, hang and come back. Every call ends in time, reports only results that are known,
and succeeds again after the fault.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flexkv.remote.base import NOT_SAID, Outcome, Presence
from tests.servers.mooncake import Master, Owner, mooncake
from tests.servers.namespace import Namespace, network_namespace
from tests.unit.remote.mooncake_child import StoreChild, store_child

DEADLINE_S = 5.0
HEALED_S = 30.0
HANG_S = 15.0
"""A call that takes longer than this many seconds counts as hanging. The slowest call takes 4.3 s on an idle machine.
"""
VALUE = [bytes(range(200)), b"trailer"]
SIZES = [200, 7]


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    with network_namespace() as made:
        yield made


@pytest.fixture
def servers(namespace: Namespace, tmp_path: Path) -> Iterator[tuple[Master, Owner]]:
    with mooncake(namespace, tmp_path, mib=64) as made:
        yield made


@pytest.fixture
def child(namespace: Namespace, servers: tuple[Master, Owner], tmp_path: Path) -> Iterator[StoreChild]:
    with store_child(namespace, tmp_path, servers[0].url) as made:
        assert made.call("put", ["kept"], [VALUE], DEADLINE_S) == [Outcome.OK]
        yield made


def until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + HEALED_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.1)


def assert_nothing_is_known(child: StoreChild, seconds: float) -> None:
    """Asserts that each call ends within `seconds`, and that its result is unknown or a failure."""
    assert child.ask("exists", ["kept"], DEADLINE_S) == [Presence.UNKNOWN]
    assert child.seconds < seconds
    assert child.call("get", ["kept"], [SIZES], DEADLINE_S)[0] == [Outcome.FAILED]
    assert child.seconds < seconds
    assert child.call("put", ["other"], [VALUE], DEADLINE_S) == [Outcome.FAILED]
    assert child.seconds < seconds
    assert child.ask("remove", ["kept"], DEADLINE_S) == [False]
    assert child.seconds < seconds
    assert "master" in child.call("last_error")
    assert "master" in child.ask("alive", DEADLINE_S)
    assert child.seconds < seconds


def works(child: StoreChild) -> bool:
    return (
        child.ask("alive", DEADLINE_S) == ""
        and child.call("put", ["again"], [VALUE], DEADLINE_S) == [Outcome.OK]
        and child.call("get", ["again"], [SIZES], DEADLINE_S) == ([Outcome.OK], [VALUE], True)
    )


def test_store_opens_before_its_master(namespace: Namespace, tmp_path: Path) -> None:
    master = Master(namespace, tmp_path / "master.log")
    owner = Owner(namespace, master, tmp_path / "owner.log", 64)
    with store_child(namespace, tmp_path, master.url) as child:
        assert_nothing_is_known(child, HANG_S)
        try:
            master.start()
            owner.start()
            until(lambda: works(child))
        finally:
            owner.kill()
            master.kill()


def test_killed_master_costs_no_waiting_and_its_successor_is_used(
    child: StoreChild, servers: tuple[Master, Owner]
) -> None:
    master, _ = servers
    master.kill()
    # The limit is 4 s because a call of Mooncake's library takes at least 4.3 s. So this shows that flexkv does not
    # call the library.
    assert_nothing_is_known(child, 4.0)
    master.start()
    until(lambda: child.ask("exists", ["kept"], DEADLINE_S) == [Presence.NO])
    until(lambda: works(child))


def test_stopped_master_holds_a_call_for_a_second(child: StoreChild, servers: tuple[Master, Owner]) -> None:
    master, _ = servers
    master.pause()
    assert_nothing_is_known(child, HANG_S)
    master.resume()
    until(lambda: works(child))
    # The child had sent a removal to the stopped master, and its call had given up. When the master continues, it
    # carries out the removal.
    assert child.ask("exists", ["kept"], DEADLINE_S) == [Presence.NO]


def test_store_opens_before_its_stopped_master_goes_on(
    namespace: Namespace, servers: tuple[Master, Owner], tmp_path: Path
) -> None:
    master, _ = servers
    master.pause()
    with store_child(namespace, tmp_path, master.url) as child:
        assert_nothing_is_known(child, HANG_S)
        master.resume()
        until(lambda: works(child))


def test_values_of_a_killed_owner_exist_and_cannot_be_read(
    child: StoreChild, servers: tuple[Master, Owner]
) -> None:
    """After the owner of a value was killed, gets of the value fail. Until the owner's time to live ends, the store
    wrongly reports that the name exists, and that putting the value again succeeded.
    """
    _, owner = servers
    owner.kill()
    assert child.ask("exists", ["kept"], DEADLINE_S) == [Presence.YES]
    assert child.call("get", ["kept"], [SIZES], DEADLINE_S)[0] == [Outcome.FAILED]
    assert child.seconds < HANG_S
    assert "owner" in child.call("last_error")
    assert child.call("put", ["kept"], [VALUE], DEADLINE_S) == [Outcome.OK]
    assert child.call("get", ["kept"], [SIZES], DEADLINE_S)[0] == [Outcome.FAILED]
    assert child.ask("remove", ["kept"], DEADLINE_S) == [True]
    assert child.ask("exists", ["kept"], DEADLINE_S) == [Presence.NO]


def test_stopped_owner_ends_a_call_and_writes_nothing_later(
    child: StoreChild, servers: tuple[Master, Owner]
) -> None:
    _, owner = servers
    names = [f"page/{i}" for i in range(8)]
    assert child.call("put", names, [[b"x" * (1 << 20)]] * 8, DEADLINE_S) == [Outcome.OK] * 8
    owner.pause()
    outcomes = child.call("get_and_hold", names, 1 << 20, DEADLINE_S)
    assert outcomes == [Outcome.FAILED] * 8
    assert child.seconds < HANG_S
    owner.resume()
    time.sleep(0.5)
    assert child.call("bytes_held") == 0
    until(lambda: child.call("get", names, [[1 << 20]] * 8, DEADLINE_S)[0] == [Outcome.OK] * 8)
    assert child.call("get", ["kept"], [SIZES], DEADLINE_S) == ([Outcome.OK], [VALUE], True)


def test_client_killed_in_a_get_leaves_nothing_behind(
    child: StoreChild, namespace: Namespace, servers: tuple[Master, Owner], tmp_path: Path
) -> None:
    names = [f"page/{i}" for i in range(32)]
    assert (
        child.call("put", names, [[bytes([i]) * (1 << 20)] for i in range(32)], HEALED_S) == [Outcome.OK] * 32
    )
    shared = set(os.listdir("/dev/shm"))
    with store_child(namespace, tmp_path, servers[0].url) as killed:
        assert killed.ask("alive", DEADLINE_S) == ""
        # The call repeats the names, so that it is long enough to be still running at the kill.
        killed.begin("get", names * 30, [[1 << 20]] * 960, HEALED_S)
        time.sleep(0.5)
        killed.kill_now()
    assert set(os.listdir("/dev/shm")) <= shared
    outcomes, parts, kept = child.call("get", names, [[1 << 20]] * 32, HEALED_S)
    assert outcomes == [Outcome.OK] * 32
    assert [part[0] for (part,) in parts] == list(range(32))
    assert kept
    assert child.ask("remove", names, DEADLINE_S) == [True] * 32


def test_control_store_without_its_owner_does_not_work(
    child: StoreChild, servers: tuple[Master, Owner]
) -> None:
    """A control: the helper `works` returns False while the store does not work."""
    servers[1].pause()
    assert not works(child)
    servers[1].resume()


def test_value_whose_writer_was_killed_is_never_given(namespace: Namespace, tmp_path: Path) -> None:
    """A value whose writer was killed inside its put is never returned by a get. The owner is stopped, so the kill
    comes inside the put. Until the master discards that put, the library reports success for another put of the same
    name, although this put has no effect."""
    value, size = [bytes(8 << 20)], [8 << 20]
    master = Master(namespace, tmp_path / "master.log")
    owner = Owner(namespace, master, tmp_path / "owner.log", 64)
    master.start("--put_start_discard_timeout_sec=8", "--put_start_release_timeout_sec=16")
    try:
        owner.start()
        with (
            store_child(namespace, tmp_path, master.url) as child,
            store_child(namespace, tmp_path, master.url) as writer,
        ):
            assert child.ask("alive", DEADLINE_S) == writer.ask("alive", DEADLINE_S) == ""
            owner.pause()
            writer.begin("put", ["half"], [value], HEALED_S)
            until(lambda: child.ask("sizes", ["half"], DEADLINE_S) == [NOT_SAID])
            writer.kill_now()
            owner.resume()
            for put in ([], [Outcome.OK]):
                assert not put or child.call("put", ["half"], [value], DEADLINE_S) == put
                assert child.call("get", ["half"], [size], DEADLINE_S)[0] == [Outcome.FAILED]
                assert "never written to its end" in child.call("last_error")

            def given() -> bool:
                child.call("put", ["half"], [value], DEADLINE_S)
                return child.call("get", ["half"], [size], DEADLINE_S) == ([Outcome.OK], [value], True)

            until(given)
    finally:
        owner.kill()
        master.kill()
