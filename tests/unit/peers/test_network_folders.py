"""Units on several machines share folders through a real network file system, whose server stops or ends.

Two sshfs mounts of one folder stand for two machines: neither mount is notified of what is written through the other,
and each caches what it has read for a while.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flexkv import c_ext
from flexkv.peers import distant_units
from flexkv.peers.live_file import LIVE_NAME
from tests.servers.sftp_mounts import NoMounts, SftpMount
from tests.servers.stopping import stop_all_threads
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.vllm_objects import make_request
from tests.unit.peers.live_engines import PROMPT, Make, knows, settings_of, share_of, wait_for

PAGES = 5
CLOSE_S = 15.0
"""Time limit for closing an engine, which waits for its readers, its disks and its threads, one after another."""
OPTIONS = "dir_cache=no,attr_timeout=0.3,entry_timeout=0.3"
"""Options with which sshfs caches nothing, while the kernel caches attributes for 0.3 s."""
BEAT_S = 0.2
"""Seconds between heartbeats. Other units treat a unit as gone one second after they saw its last heartbeat."""
CACHED, CACHED_BEAT_S = "dcache_timeout=1", 0.5
"""sshfs caches attributes for a second, and the kernel caches sshfs's answers for another second. Together this is less
than five heartbeats, after which a unit counts as gone."""

Mounts = Callable[..., SftpMount]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mounts]:
    """Returns a function that mounts the exported folder through sshfs. Each call makes another mount."""
    (tmp_path / "export").mkdir()
    mounts: list[SftpMount] = []

    def make(name: str, options: str = OPTIONS) -> SftpMount:
        try:
            mounts.append(SftpMount(tmp_path / "export", tmp_path / name, options))
        except NoMounts as error:
            pytest.skip(f"no network file system: {error}")
        return mounts[-1]

    yield make
    for mounted in mounts:
        mounted.close()


class Machine:
    """A simulated machine: a mount of the shared folder, and an engine with a disk folder in this mount."""

    def __init__(self, mounted: SftpMount, make_engine: Make, **more: Any) -> None:
        self.mount = mounted
        self.engine = make_engine(
            **settings_of(mounted.path.with_name(f"run-{mounted.path.name}"), "disk")
            | {
                "disk.folders": str(mounted.path / mounted.path.name),
                "disk.bytes_per_folder": 4 << 20,
                "peers.across_machines": True,
                "peers.beat_s": BEAT_S,
            }
            | more
        )

    def store(self, prompt: list[int]) -> None:
        self.engine.run(make_request(prompt, f"store {prompt[0]}"))
        self.engine.until(lambda: not self.engine.unit.busy)

    def serves(self, prompt: list[int]) -> int:
        """Runs the prompt, and compares every number that is loaded. Returns the number of tokens that flexkv
        served."""
        return self.engine.run(make_request(prompt, f"serve {prompt[0]} {time.monotonic_ns()}"))

    def knows(self, pages: int) -> None:
        wait_for(lambda: knows(self.engine, pages))

    def follows(self, units: int) -> None:
        wait_for(lambda: share_of(self.engine).joined == units)


@pytest.fixture
def machines(
    mount: Mounts, make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Machine, Machine]]:
    """Returns a function that starts two machines."""
    numbers = itertools.count()
    monkeypatch.setattr(distant_units, "machine_id", lambda: f"machine {next(numbers)}")

    def make(options: str = OPTIONS, **more: Any) -> tuple[Machine, Machine]:
        one, other = (Machine(mount(name, options), make_engine, **more) for name in "ab")
        return one, other

    return make


def prompt(number: int) -> list[int]:
    return [token + 1000 * number for token in PROMPT]


def test_units_of_two_mounts_serve_each_other_what_they_have_and_what_comes(
    machines: Callable[..., tuple[Machine, Machine]],
) -> None:
    one, other = machines(CACHED, **{"peers.beat_s": CACHED_BEAT_S})
    one.store(prompt(0))
    other.knows(PAGES)
    assert other.serves(prompt(0)) == 20
    other.store(prompt(1))
    one.knows(PAGES)
    assert one.serves(prompt(1)) == 20
    one.store(prompt(2))
    other.knows(2 * PAGES)
    assert other.serves(prompt(2)) == 20
    assert share_of(other.engine).joined == 1, "no heartbeat came too late"
    one.engine.close()
    other.knows(0)
    assert not list(one.mount.path.glob(f"a/*/*/{LIVE_NAME}"))


def test_places_that_get_other_pages_are_read_anew(machines: Callable[..., tuple[Machine, Machine]]) -> None:
    """A reader gets the new page of a slot that was overwritten, even if its mount cached the old page. The folder has
    slots for only a few prompts, so the reader has read every slot before it is overwritten.
    """
    one, other = machines(**{"disk.bytes_per_folder": 128 << 10})
    for number in range(6):
        one.store(prompt(number))
        wait_for(lambda: holds(other.engine, prompt(number)))  # noqa: B023
        assert other.serves(prompt(number)) == 20
        other.engine.forget()


def holds(engine: MiniEngine, tokens: list[int]) -> bool:
    """Whether the engine knows, for every page of the prompt, another machine's folder that has the page."""
    directory = share_of(engine).disk
    assert directory is not None
    peers, *_ = directory.find(0, engine.keys_of(make_request(tokens)))
    return bool((peers >= 0).all())


def test_a_server_that_stops_costs_misses_and_no_wait(
    machines: Callable[..., tuple[Machine, Machine]],
) -> None:
    one, other = machines(**{"disk.stuck_s": 1.0, "transfer.close_s": 1.0})
    one.store(prompt(0))
    other.knows(PAGES)
    other.engine.run(make_request(prompt(1), "own"))
    other.engine.until(lambda: not other.engine.unit.busy)
    one.follows(1)
    other.mount.signal_server(signal.SIGSTOP)
    other.engine.add(make_request(prompt(0), "stopped"))
    other.engine.end_load("stopped")
    other.engine.step()
    other.engine.check("stopped")
    assert other.serves(prompt(1)) == 20, "its own host memory"
    one.follows(0)
    began_s = time.monotonic()
    other.engine.close()
    assert time.monotonic() - began_s < CLOSE_S
    assert one.serves(prompt(0)) == 20
    other.mount.signal_server(signal.SIGCONT)


def test_a_server_that_is_stopped_for_a_while_is_found_again(
    machines: Callable[..., tuple[Machine, Machine]],
) -> None:
    one, other = machines()
    one.store(prompt(0))
    other.knows(PAGES)
    one.mount.signal_server(signal.SIGSTOP)
    other.knows(0)
    one.mount.signal_server(signal.SIGCONT)
    other.knows(PAGES)
    assert other.serves(prompt(0)) == 20


def test_a_server_that_is_killed_costs_misses(machines: Callable[..., tuple[Machine, Machine]]) -> None:
    one, other = machines()
    one.store(prompt(0))
    other.knows(PAGES)
    other.store(prompt(1))
    one.knows(PAGES)
    other.mount.signal_server(signal.SIGKILL)
    other.engine.add(make_request(prompt(0), "killed"))
    other.engine.end_load("killed")
    other.engine.step()
    other.engine.check("killed")
    assert other.serves(prompt(1)) == 20, "its own host memory"
    one.knows(0)
    assert one.serves(prompt(0)) == 20
    other.engine.close()


# --- no call holds the interpreter's lock while it waits ---


def pause_while(mounted: SftpMount, call: Callable[[], object]) -> float:
    """Stops the mount's client for a second, and calls `call`, which waits for the client. Returns the longest time, in
    seconds, for which no other thread of this interpreter could run during `call`.
    """
    ticks = [time.monotonic()]
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.001)

    # This process must be started before the client stops. A new process closes its copies of all descriptors, and for
    # a file on the mount this would wait for the client.
    wake = subprocess.Popen(
        ["sh", "-c", f"read _; sleep 1; kill -CONT {mounted.client}"], stdin=subprocess.PIPE
    )
    assert wake.stdin is not None
    stop_all_threads(mounted.client)
    wake.stdin.close()
    ticking = threading.Thread(target=tick)
    ticking.start()
    try:
        began_s = time.monotonic()
        call()
        assert time.monotonic() - began_s > 0.3, "the call did not wait"
    finally:
        wake.wait(30)
        done.set()
        ticking.join()
    return max(later - sooner for sooner, later in itertools.pairwise(ticks))


def slab_of(mounted: SftpMount) -> Path:
    path = mounted.path / "slab"
    path.write_bytes(bytes(8192))
    return path


@pytest.mark.parametrize("what", ["close", "look"])
def test_a_slab_that_waits_for_a_server_holds_up_no_other_thread(mount: Mounts, what: str) -> None:
    mounted = mount("a", "dir_cache=no,attr_timeout=0,entry_timeout=0")
    slabs = [c_ext.SlabFile(str(slab_of(mounted)), 4096, 4096, 1, 7)]
    calls = {"close": slabs.clear, "look": lambda: slabs[0].in_place}
    assert pause_while(mounted, calls[what]) < 0.3


def test_control_a_close_that_holds_the_interpreter_lock_holds_up_all(mount: Mounts) -> None:
    mounted = mount("a")
    fd = os.open(slab_of(mounted), os.O_RDWR)
    assert pause_while(mounted, lambda: ctypes.PyDLL(None).close(fd)) > 0.3
