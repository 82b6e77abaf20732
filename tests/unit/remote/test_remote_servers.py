"""Servers of a unit's store die, stop, lose their values, fill up and disconnect. The pages on such a server are then
misses, and the remote tier recovers.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flexkv.errors import ConfigError, FlexKVError, StoreError
from tests.servers.redis import RedisServer, free_port, redis_server
from tests.unit.remote.helper_faults import (
    Plan,
    begin_fetch,
    children,
    heals,
    load_in_time,
    rest_briefly,
    use_faulty_helpers,
    wait_for,
    write_all,
)
from tests.unit.remote.remote_unit import BLOCK_TOKENS, RemoteUnit, chain

PAGES = 20
KEYS = chain("prompt", PAGES)
FAST = {"remote__get_s": 0.5, "remote__stuck_s": 3.0}
Build = Callable[..., RemoteUnit]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as made:
        yield made


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    return use_faulty_helpers(tmp_path, monkeypatch)


@pytest.fixture
def build(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    rest_briefly(monkeypatch)
    units: list[RemoteUnit] = []

    def make(url: str = "", **settings: object) -> RemoteUnit:
        units.append(RemoteUnit(url or server.url, **{**FAST, **settings}))  # type: ignore[arg-type]
        return units[-1]

    yield make
    for unit in units:
        unit.close()


def test_server_that_comes_later_is_used(build: Build, tmp_path: Path) -> None:
    late = RedisServer(tmp_path, port=free_port())
    unit = build(late.url)
    assert "refused" in unit.tier.down
    assert load_in_time(unit, KEYS) == 0
    assert unit.plane.totals.lookups == {}, "nothing is asked while the store is away"
    late.start()
    try:
        write_all(unit, KEYS)
        heals(build(late.url), KEYS)
        unit.check_no_leaks()
    finally:
        late.stop()


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_server_that_is_lost_and_found(build: Build, server: RedisServer, how: str) -> None:
    unit = build()
    write_all(unit, KEYS)
    server.stop() if how == "killed" else server.freeze()
    unit.lose_host()
    assert load_in_time(unit, KEYS) == 0
    other = build()
    assert other.tier.down
    other.store(KEYS[:4])
    other.settle()
    unit.poll_until(lambda: unit.tier.down, "the loss is seen")
    if how == "killed":
        server.start()
        unit.up()
        assert load_in_time(unit, KEYS) == 0, "it is empty"
        # After a loss, the unit forgets which keys the store has, so it asks again. The missing pages are computed and
        # written again.
        write_all(other, KEYS)
        unit.poll_until(lambda: load_in_time(unit, KEYS) == PAGES * BLOCK_TOKENS, "absence is forgotten")
        unit.check_no_leaks()
    else:
        server.thaw()
    heals(unit, KEYS)
    heals(other, KEYS)


def test_one_frozen_server_of_three_costs_its_own_pages(build: Build, tmp_path: Path) -> None:
    """If one of three servers is frozen, the unit misses only pages on this server, and the tier stays up. Each prompt
    has one page."""
    with redis_server(tmp_path) as one, redis_server(tmp_path) as two, redis_server(tmp_path) as three:
        urls = ",".join(server.url for server in (one, two, three))
        prompts = [chain(f"prompt {number}", 1) for number in range(24)]
        unit = build(urls, remote__probe_s=1.0)
        for keys in prompts:
            write_all(unit, keys)
        lost = int(two.ask("DBSIZE")[1:])
        assert 0 < lost < len(prompts)
        reader = build(urls, remote__probe_s=1.0)
        two.freeze()
        served = [load_in_time(reader, keys) for keys in prompts]
        assert sorted(served) == [0] * lost + [BLOCK_TOKENS] * (len(prompts) - lost)
        assert not reader.tier.down
        assert reader.plane.totals.restarts == 0
        two.thaw()
        for keys in prompts:
            heals(reader, keys)


def test_server_stopped_inside_gets(build: Build, plan: Plan, server: RedisServer) -> None:
    unit = build()
    write_all(unit, KEYS)
    unit.lose_host()
    plan.set("get", "hold")
    begin_fetch(unit, KEYS)
    wait_for(plan.reached.exists, "the first values came")
    server.freeze()
    plan.clear()
    assert load_in_time(unit, KEYS) < PAGES * BLOCK_TOKENS
    unit.settle()
    assert unit.plane.totals.gets["failed"]
    server.thaw()
    heals(unit, KEYS)


def test_full_server_keeps_what_it_has(build: Build, tmp_path: Path) -> None:
    with redis_server(tmp_path, maxmemory=3 << 20) as small:
        unit, keys = build(small.url), chain("many", 250)
        for first in range(0, 250, 50):
            unit.store(keys[first : first + 50])
            unit.settle()
        totals = unit.plane.totals
        assert totals.puts["full"]
        assert totals.puts["ok"]
        assert not unit.tier.down
        unit.lose_host()
        assert 0 < load_in_time(unit, keys) < 250 * BLOCK_TOKENS
        small.ask("FLUSHALL")
        write_all(unit, KEYS)
        heals(unit, KEYS)


class Proxy:
    """A proxy between a unit and its server. After a number of bytes of answers that a test sets, it cuts the
    connection.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        self.left: int | None = None
        """Number of bytes of answers after which the proxy cuts the connection; None if it cuts none."""
        self.cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._to))
            threading.Thread(target=self._carry, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._carry, args=(server, client, True), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        try:
            while got := source.recv(1 << 16):
                left = self.left if answers else None
                if left is not None and len(got) >= left:
                    target.sendall(got[:left])
                    self.left, self.cuts = None, self.cuts + 1
                    break
                if left is not None:
                    self.left = left - len(got)
                target.sendall(got)
        except OSError:
            pass
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def close(self) -> None:
        self._listener.close()


@contextmanager
def proxy(server: RedisServer) -> Iterator[Proxy]:
    made = Proxy(server.port)
    yield made
    made.close()


@pytest.mark.parametrize("value_bytes", [1, 4000, 9540, 30_000])
def test_connection_cut_inside_a_value(build: Build, server: RedisServer, value_bytes: int) -> None:
    write_all(build(), KEYS)
    with proxy(server) as between:
        unit = build(between.url)
        # The answers before the values, which say which names exist, take far less than 200 bytes. So the cut comes
        # inside the values.
        between.left = 200 + value_bytes
        tokens = load_in_time(unit, KEYS)
        assert between.cuts == 1
        assert tokens < PAGES * BLOCK_TOKENS
        heals(unit, KEYS)


def test_two_units_write_the_same_pages_at_once(build: Build) -> None:
    one, two = build(), build()
    keys = chain("both", 120)
    for first in range(0, 120, 10):
        for unit in (one, two):
            unit.store(keys[first : first + 10])
            unit.unit.poll()
    for unit in (one, two):
        unit.settle()
        unit.check_no_leaks()
    puts = one.plane.totals.puts + two.plane.totals.puts
    assert puts["ok"] >= 120
    assert puts["ok"] + puts["known"] == 240
    heals(build(), keys)


def test_reset_with_gets_in_flight(build: Build, plan: Plan) -> None:
    write_all(build(), KEYS)
    unit = build()
    plan.set("get", "hold")
    begin_fetch(unit, KEYS)
    wait_for(plan.reached.exists, "the first values came")
    unit.manager.reset()
    plan.clear()
    assert load_in_time(unit, KEYS) == 0
    unit.settle()
    assert load_in_time(unit, KEYS) == 0
    unit.check_no_leaks()


def test_reset_with_puts_in_flight(build: Build, plan: Plan, server: RedisServer) -> None:
    unit = build(remote__batch_pages=4)
    plan.set("put", "hold")
    unit.store(KEYS)
    unit.poll_until(plan.reached.exists, "the first values are put")
    unit.manager.reset()
    new = chain("of new weights", 10)
    unit.store(new)
    plan.clear()
    unit.settle()
    assert load_in_time(unit, new) == 10 * BLOCK_TOKENS, "host memory has them"
    unit.check_no_leaks()
    stored = int(server.ask("DBSIZE")[1:])
    reader = build()
    assert load_in_time(reader, new) == 0
    assert load_in_time(reader, KEYS) == stored * BLOCK_TOKENS, "what there is are pages of before the reset"


def test_control_without_a_reset_they_are_put_and_served(build: Build, plan: Plan) -> None:
    unit = build(remote__batch_pages=4)
    plan.set("put", "hold")
    unit.store(KEYS)
    unit.poll_until(plan.reached.exists, "the first values are put")
    new = chain("more", 10)
    unit.store(new)
    plan.clear()
    unit.settle()
    reader = build()
    assert load_in_time(reader, new) == 10 * BLOCK_TOKENS
    assert load_in_time(reader, KEYS) == PAGES * BLOCK_TOKENS


def our_shared_memory() -> set[str]:
    """Returns the names of flexkv's files in /dev/shm. Files of other programs are left out, because they appear and
    disappear during a test."""
    return {name for name in os.listdir("/dev/shm") if "flexkv" in name}


def refused(error: type[FlexKVError], says: str, url: str, **settings: object) -> None:
    """Asserts that building a unit raises `error` with the message `says`, and leaves no process, descriptor or shared
    memory behind."""
    gc.collect()  # closes descriptors of earlier tests' objects
    before = children(), len(os.listdir("/proc/self/fd")), our_shared_memory()
    with pytest.raises(error, match=says):
        RemoteUnit(url, **settings)  # type: ignore[arg-type]
    after = children(), len(os.listdir("/proc/self/fd")), our_shared_memory()
    assert (after[0], after[2]) == (before[0], before[2])
    # An earlier test's thread may still close a descriptor meanwhile, so there may be fewer.
    assert after[1] <= before[1]


HERE = "redis://127.0.0.1:1"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://127.0.0.1:80", "mooncake, redis, rediss"),
        ("mooncake://127.0.0.1", "HOST:PORT"),
        ("redis://127.0.0.1:1,mooncake://127.0.0.1:2", "one scheme"),
        ("redis://store.example:6379", "trusted_network"),
        ("mooncake://10.0.0.1:50051", "trusted_network"),
    ],
)
def test_urls_that_cannot_be_are_refused(url: str, says: str) -> None:
    refused(FlexKVError, says, url)


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [(b"secret", 0o644, "chmod 600"), (b"secret", 0o640, "chmod 600"), (b"\n", 0o600, "empty")],
)
def test_password_files_that_cannot_be_used(tmp_path: Path, content: bytes, mode: int, says: str) -> None:
    path = tmp_path / "password"
    path.write_bytes(content)
    path.chmod(mode)
    refused(ConfigError, says, HERE, remote__password_file=str(path))


def test_settings_that_cannot_be_had(tmp_path: Path) -> None:
    refused(ConfigError, "No such file", HERE, remote__password_file=str(tmp_path / "absent"))
    refused(ConfigError, "remote.get_s", HERE, remote__stuck_s=2.0, remote__get_s=2.0)
    refused(StoreError, "no_card0", "mooncake://127.0.0.1:50051", remote__rdma_devices="no_card0")
    refused(StoreError, "password_file", HERE, remote__user="somebody")


def test_absent_library_is_refused_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    refused(StoreError, r"pip install mooncake-transfer-engine-non-cuda", "mooncake://127.0.0.1:50051")


def test_control_settings_that_can_be_had(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_bytes(b"secret\n")
    path.chmod(0o600)
    unit = RemoteUnit(HERE, remote__password_file=str(path), remote__stuck_s=3.0)
    assert unit.tier.down
    assert unit.close()
