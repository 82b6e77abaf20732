"""Compares flexkv's client of Redis with hiredis, Redis's own C client, on one server on this machine.

The program puts and gets values of 2 MiB in batches of 8. flexkv's client reads each value directly into its place in
one buffer. hiredis reads into its own memory, so the time of its get includes a copy of each value to the same place.
Rounds are interleaved; medians are shown. A probe asks whether the server has 256 names. For comparison, "raw" sends a
probe's bytes over a plain blocking socket, and receives the replies without parsing them. hiredis makes no probes,
because most of the time would be spent in calls from Python, one per name.

    python -m benchmarks.remote_redis [--rounds 15] [--json FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import json
import os
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.arguments import at_least_one
from flexkv.remote.base import Outcome, Presence, StoreOptions
from flexkv.remote.redis.resp import command_a_name
from flexkv.remote.stores import open_store
from tests.servers.redis import RedisServer, redis_server

VALUE_BYTES = 2 << 20
BATCH = 8
VALUES = 64
"""Number of values: 128 MiB in all, which is more than the CPU caches of most machines."""
PROBED = 256
PROBES = 50
"""Number of probes per round."""
DEADLINE_S = 60.0
GET_BAR = 0.8
BULK_REPLY = 1

Pages = NDArray[np.uint8]
Method = Callable[[], None]


class Reply(ctypes.Structure):
    """The first fields of `redisReply` in versions of hiredis before 1.0."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("integer", ctypes.c_longlong),
        ("len", ctypes.c_size_t),
        ("str", ctypes.c_void_p),
    )


class NewReply(ctypes.Structure):
    """The first fields of `redisReply` since hiredis 1.0. In C, `dval` is a double. This program never reads it, so it
    is declared as an integer of the same size.
    """

    _fields_ = (
        ("type", ctypes.c_int),
        ("integer", ctypes.c_longlong),
        ("dval", ctypes.c_longlong),
        ("len", ctypes.c_size_t),
        ("str", ctypes.c_void_p),
    )


class Hiredis:
    """A client that calls the C library hiredis through ctypes."""

    def __init__(self, library: str, port: int) -> None:
        self._lib = lib = ctypes.CDLL(library)
        self._new = ".so.0" not in library
        lib.redisConnect.restype = ctypes.c_void_p
        lib.redisConnect.argtypes = [ctypes.c_char_p, ctypes.c_int]
        lib.redisAppendCommandArgv.argtypes = [
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]
        lib.redisGetReply.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        lib.freeReplyObject.argtypes = [ctypes.c_void_p]
        self._context = lib.redisConnect(b"127.0.0.1", port)
        assert self._context, "hiredis did not connect"

    def get(self, names: list[str], pages: Pages) -> None:
        for name in names:
            self._append(b"GET", name.encode())
        for page in pages:
            address, reply = self._next()
            assert reply.type == BULK_REPLY
            assert reply.len == page.nbytes
            ctypes.memmove(page.ctypes.data, reply.str, reply.len)
            self._lib.freeReplyObject(address)

    def put(self, names: list[str], pages: Pages) -> None:
        for name, page in zip(names, pages, strict=True):
            self._append(b"SET", name.encode(), page)
        for _ in names:
            self._lib.freeReplyObject(self._next()[0])

    def _append(self, word: bytes, name: bytes, page: Pages | None = None) -> None:
        argv: list[object] = [ctypes.c_char_p(word), ctypes.c_char_p(name)]
        sizes = [len(word), len(name)]
        if page is not None:
            argv.append(ctypes.c_void_p(page.ctypes.data))
            sizes.append(page.nbytes)
        addresses = [ctypes.cast(text, ctypes.c_void_p) for text in argv]  # type: ignore[arg-type]
        count = len(sizes)
        words = (ctypes.c_void_p * count)(*addresses)
        assert not self._lib.redisAppendCommandArgv(
            self._context, count, words, (ctypes.c_size_t * count)(*sizes)
        )

    def _next(self) -> tuple[ctypes.c_void_p, Reply | NewReply]:
        address = ctypes.c_void_p()
        assert not self._lib.redisGetReply(self._context, ctypes.byref(address)), (
            "hiredis lost its connection"
        )
        if self._new:
            return address, ctypes.cast(address, ctypes.POINTER(NewReply)).contents
        return address, ctypes.cast(address, ctypes.POINTER(Reply)).contents


def medians(methods: dict[str, Method], rounds: int, repeats: int = 1) -> dict[str, float]:
    """Returns the median seconds of one call of each method. The methods take turns in a rotating order, so that noise
    affects all methods alike.
    """
    times: dict[str, list[float]] = {name: [] for name in methods}
    order = list(methods)
    for method in methods.values():
        method()
    for _ in range(rounds):
        for name in order:
            for _ in range(repeats):
                begun = time.perf_counter()
                methods[name]()
                times[name].append(time.perf_counter() - begun)
        order.append(order.pop(0))
    return {name: statistics.median(taken) for name, taken in times.items()}


def by_batches(move: Callable[[list[str], Pages], None], names: list[str], pages: Pages) -> Method:
    def run() -> None:
        for at in range(0, VALUES, BATCH):
            move(names[at : at + BATCH], pages[at : at + BATCH])

    return run


def measure(server: RedisServer, rounds: int) -> dict[str, dict[str, float]]:
    """Returns median seconds by operation and client. The times of "get" and "put" are for all values, and those of
    "exists" for one probe.
    """
    store = open_store(StoreOptions((server.url,)))
    names = [f"{number:064x}" for number in range(VALUES)]
    probed = [f"{number:064x}" for number in range(PROBED)]
    pages = np.random.default_rng(0).integers(0, 256, (VALUES, VALUE_BYTES), np.uint8)
    target = np.zeros_like(pages)

    def get(some: list[str], into: Pages) -> None:
        assert set(store.get(some, [[page] for page in into], DEADLINE_S)) == {Outcome.OK}

    def put(some: list[str], given: Pages) -> None:
        assert set(store.put(some, [[page] for page in given], DEADLINE_S)) == {Outcome.OK}

    def exists() -> None:
        assert store.exists(probed, DEADLINE_S).count(Presence.YES) == VALUES

    raw = socket.create_connection(("127.0.0.1", server.port))
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    asked = command_a_name(b"EXISTS", [name.encode() for name in probed])

    def ask_raw() -> None:
        raw.sendall(asked)
        left = PROBED * len(b":1\r\n")
        while left:
            left -= len(raw.recv(left))

    puts = {"flexkv": by_batches(put, names, pages)}
    gets = {"flexkv": by_batches(get, names, target)}
    probes = {"flexkv": exists, "raw": ask_raw}
    library = ctypes.util.find_library("hiredis")
    if library is not None:
        other = Hiredis(library, server.port)
        puts["hiredis"] = by_batches(other.put, names, pages)
        gets["hiredis"] = by_batches(other.get, names, target)
    taken = {"put": medians(puts, rounds), "get": medians(gets, rounds)}
    for name, method in gets.items():
        target[:] = 0
        method()
        assert np.array_equal(target, pages), name
    taken["exists"] = medians(probes, rounds, PROBES)
    store.close()
    raw.close()
    return taken


def show(taken: dict[str, dict[str, float]]) -> None:
    table = Table("", "flexkv", "hiredis", "raw", "flexkv / hiredis", "bar")
    for what, seconds in taken.items():
        rates = what != "exists"

        def cell(name: str, seconds: dict[str, float] = seconds, rates: bool = rates) -> str:
            if name not in seconds:
                return "-"
            moved = VALUES * VALUE_BYTES / seconds[name] / 1e9
            return f"{moved:.2f} GB/s" if rates else f"{seconds[name] * 1e3:.3f} ms"

        ratio = f"{seconds['hiredis'] / seconds['flexkv']:.2f} x" if "hiredis" in seconds else "-"
        bars = {"get": f">= {GET_BAR}", "exists": "raw + 0.3 ms"}
        named = f"exists of {PROBED}" if what == "exists" else what
        table.add_row(named, cell("flexkv"), cell("hiredis"), cell("raw"), ratio, bars.get(what, ""))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--rounds", type=at_least_one, default=15)
    arguments = parser.parse_args()
    if not any(map(shutil.which, ("redis-server", "redis-check-rdb"))):
        print("skipped: neither redis-server nor redis-check-rdb is on PATH")
        return
    if ctypes.util.find_library("hiredis") is None:
        print("without hiredis, which is not installed (Debian: libhiredis0.14): no ratio")
    with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder)) as server:
        taken = measure(server, arguments.rounds)
    show(taken)
    if arguments.json:
        report = {
            "value_bytes": VALUE_BYTES,
            "batch": BATCH,
            "values": VALUES,
            "probed": PROBED,
            "rounds": arguments.rounds,
            "cpus": os.cpu_count(),
            "load": os.getloadavg(),
            "seconds": taken,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
