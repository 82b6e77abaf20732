"""Units whose store is a real Mooncake. Its servers die, stop, and report pages that they do not have. Even then, every
page is loaded unchanged or is a miss, no slot is lost, and the remote tier recovers.

Units and servers run in a network namespace. If no namespace can be made, the tests are skipped with that reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flexkv.remote.plane import LOST
from tests.servers.mooncake import Master, Owner, mooncake
from tests.servers.namespace import Namespace, network_namespace
from tests.unit.remote.mooncake_child import StoreChild, store_child

PAGES = 24
HEALED_S = 90.0
MANY = 200
"""Number of pages of a long op, about 2 MB. A unit has 256 host slots."""


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    with network_namespace() as made:
        yield made


@pytest.fixture
def servers(namespace: Namespace, tmp_path: Path) -> Iterator[tuple[Master, Owner]]:
    with mooncake(namespace, tmp_path, mib=64) as made:
        yield made


@pytest.fixture
def child(namespace: Namespace, tmp_path: Path) -> Iterator[StoreChild]:
    """A child process in which a test can make units, by methods of `Units`."""
    program = ("-m", "tests.unit.remote.mooncake_units")
    with store_child(namespace, tmp_path, program=program, environment={}) as made:
        yield made
        assert made.call("close_all")


@pytest.fixture
def unit(child: StoreChild, servers: tuple[Master, Owner]) -> StoreChild:
    """A child process with a unit `one`, which has written a prompt to the store."""
    assert child.call("make", "one", servers[0].url) == ""
    assert child.call("store_pages", "one", "prompt", PAGES) == PAGES
    return child


def until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + HEALED_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.05)


def served(child: StoreChild, name: str, prompt: str = "prompt") -> bool:
    """Loads a prompt, and returns whether all its pages were loaded. If they were not, stores all pages again, as an
    engine does that has recomputed them."""
    if child.call("load_pages", name, prompt, PAGES) == PAGES:
        return True
    child.call("store_pages", name, prompt, PAGES)
    return False


def heals(child: StoreChild, prompt: str = "prompt") -> None:
    until(lambda: child.call("down", "one") == "")
    until(lambda: served(child, "one", prompt))
    assert child.call("check", "one") == 0


def test_what_one_unit_wrote_another_reads(unit: StoreChild, servers: tuple[Master, Owner]) -> None:
    assert unit.call("make", "two", servers[0].url) == ""
    assert unit.call("load_pages", "two", "prompt", PAGES) == PAGES
    assert unit.call("load_pages", "two", "another", PAGES) == 0
    assert unit.call("totals", "two")[0] == {"ok": PAGES}
    for name in ("one", "two"):
        assert unit.call("check", name) == 0


def test_unit_starts_before_its_master(child: StoreChild, namespace: Namespace, tmp_path: Path) -> None:
    master = Master(namespace, tmp_path / "master.log")
    owner = Owner(namespace, master, tmp_path / "owner.log", 64)
    assert "master" in child.call("make", "one", master.url)
    assert child.call("load_pages", "one", "prompt", PAGES) == 0
    try:
        master.start()
        owner.start()
        heals(child)
    finally:
        owner.kill()
        master.kill()


def test_unit_starts_while_its_master_is_stopped(child: StoreChild, servers: tuple[Master, Owner]) -> None:
    servers[0].pause()
    assert child.call("make", "one", servers[0].url)
    assert child.call("load_pages", "one", "prompt", PAGES) == 0
    servers[0].resume()
    heals(child)


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_master_that_is_lost_and_found(unit: StoreChild, servers: tuple[Master, Owner], how: str) -> None:
    master, owner = servers
    master.kill() if how == "killed" else master.pause()
    until(lambda: unit.call("load_pages", "one", "another", PAGES) == 0 and unit.call("down", "one") != "")
    assert unit.call("load_pages", "one", "prompt", PAGES) == 0
    assert unit.call("store_pages", "one", "new", 4) == 0
    if how == "killed":
        # The owner must be restarted, too: the new master does not know the values that the previous owner has.
        owner.kill()
        master.start()
        owner.start()
    else:
        master.resume()
    heals(unit)


@pytest.mark.parametrize("kind", ["get", "put"])
def test_owner_killed_in_an_op(unit: StoreChild, servers: tuple[Master, Owner], kind: str) -> None:
    """If the owner of values is killed during an op, their pages become misses, and no byte is wrong. The master still
    reports the values as present. Gets of them fail with code -800, or with -703 for values whose put was in flight.
    """
    _, owner = servers
    if kind == "get":
        assert unit.call("store_pages", "one", "long", MANY) == MANY
    assert unit.call("set_out", "one", kind, "long", MANY)
    owner.kill()
    unit.call("settle", "one")
    assert unit.call("load_pages", "one", "prompt", PAGES) == 0
    gets, puts = unit.call("totals", "one")
    assert sum((gets if kind == "get" else puts).get(outcome, 0) for outcome in ("failed", "full", LOST)) > 0
    assert unit.call("load_pages", "one", "long", MANY) < MANY
    assert unit.call("check", "one") == 0
    owner.start()
    heals(unit, "after")


def test_owner_stopped_for_a_while(unit: StoreChild, servers: tuple[Master, Owner]) -> None:
    _, owner = servers
    assert unit.call("store_pages", "one", "long", MANY) == MANY
    owner.pause()
    try:
        ends_s = time.monotonic() + 10.0
        while time.monotonic() < ends_s:
            assert unit.call("load_pages", "one", "long", MANY) < MANY
            unit.call("store_pages", "one", "meanwhile", 2)
    finally:
        owner.resume()
    heals(unit)


def test_full_store_takes_no_more_and_serves_what_it_has(
    child: StoreChild, namespace: Namespace, tmp_path: Path
) -> None:
    # With the default options, a store on a slow machine would evict values before the test has read them.
    flags = ["--default_kv_lease_ttl=600000", "--eviction_high_watermark_ratio=1.0", "--eviction_ratio=0.0"]
    with mooncake(namespace, tmp_path, mib=16, flags=flags) as (master, _):
        for name in ("one", "two"):
            assert child.call("make", name, master.url) == ""
        taken = read = 0
        for number in range(16):
            taken += child.call("store_pages", "one", f"prompt {number}", MANY)
            read += child.call("load_pages", "two", f"prompt {number}", MANY)
        assert 0 < read <= taken < 16 * MANY
        assert child.call("totals", "one")[1].get("full"), child.call("totals", "one")
        for name in ("one", "two"):
            assert child.call("down", name) == ""
            assert child.call("check", name) == 0


def test_control_a_store_without_its_owner_does_not_serve(
    unit: StoreChild, servers: tuple[Master, Owner]
) -> None:
    """A control: the helper `served` returns False while the store does not work."""
    assert served(unit, "one")
    servers[1].pause()
    assert not served(unit, "one")
    servers[1].resume()


def test_store_that_evicts_stays_in_use(child: StoreChild, namespace: Namespace, tmp_path: Path) -> None:
    """A unit does not treat a store as lost because it evicts values. A full store may even have evicted a value that
    was just written; its page is then a miss."""
    with mooncake(namespace, tmp_path, mib=16) as (master, _):
        assert child.call("make", "one", master.url) == ""
        for number in range(16):
            # Until the store has evicted some values, it may reject new ones.
            child.call("store_pages", "one", f"prompt {number}", MANY)
            child.call("load_pages", "one", f"prompt {number}", MANY)
            assert child.call("down", "one") == ""
        again = sum(child.call("load_pages", "one", f"prompt {number}", MANY) for number in range(16))
        assert again < 16 * MANY, "nothing was evicted"
        assert child.call("down", "one") == ""
        assert child.call("check", "one") == 0
