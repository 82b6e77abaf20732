"""Compares the remote tier, as a unit uses it through its helper process, with raw calls of the store's client in the
same rounds.

Pages are 2 MiB in size. The tier adds a trailer with digests when it puts a page, and verifies the digests when it gets
the page. A question asks whether the store has 256 keys. Questions are asked while the tier is idle and while it gets
pages. "raw" is a separate client in this process. Then the program times what the scheduler's thread spends on a lookup
of 256 blocks that no tier has: without a remote tier, with one, and with one whose circuit breaker is open. Mooncake's
processes run in a network namespace.

    python -m benchmarks.remote_tier [--store mooncake|redis] [--rounds 9] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.arguments import at_least_one
from flexkv.facts.keys import Keys
from flexkv.remote.base import Outcome, StoreOptions
from flexkv.remote.mooncake import CLIENT_ENVIRONMENT
from flexkv.remote.stores import open_store
from flexkv.storage.tags import make_tags
from flexkv.transfer.graph import (
    NO_BLOCKS,
    OpId,
    OpKind,
    OpStatus,
    Priority,
    SlotIds,
    TransferGraph,
    TransferOp,
)
from tests.servers.mooncake import mooncake
from tests.servers.namespace import Namespace, NoNamespace
from tests.servers.redis import redis_server
from tests.unit.remote.remote_unit import RemoteUnit, Shape, chain

PAGE_BYTES = 2 << 20
PAGES = 64
ASKED = 256
ASKS = 200
LOOKUPS = 300
PATIENCE_S = 60.0
STORES = ("mooncake", "redis")
GET_BAR, PUT_BAR = 0.8, 0.75
PROBE_BAR_MS, P99_BAR = 0.3, 1.5
LOOKUP_BAR_US, OPEN_BAR_US = 30.0, 20.0


class Rig:
    """A unit with pages of one rank, a raw client of the same store, and a copy of the pages' bytes for the raw
    client.
    """

    def __init__(self, url: str) -> None:
        runs = (PAGE_BYTES // 32,) * 32
        self.unit = RemoteUnit(
            url, Shape(ranks=1, runs=runs), host_bytes=256 << 20, host__huge_pages="auto", remote__probe_s=5.0
        )
        self.unit.up()
        self.raw = open_store(StoreOptions((url,)))
        self.sent = np.random.default_rng(0).integers(0, 256, (PAGES, PAGE_BYTES), np.uint8)
        self.came = np.zeros_like(self.sent)
        for slot in range(PAGES):
            self.unit.stripe(0, slot, 0)[:] = self.sent[slot]
        self._ops = 1 << 20
        process = self.unit.plane.link._process
        assert process is not None
        self._socket = process.fileno()

    def submit(self, kind: OpKind, keys: Keys, slots: SlotIds) -> None:
        self._ops += 1
        tags = make_tags(keys, 0, np.zeros(len(keys), np.uint64), 4)
        op = TransferOp(OpId(self._ops), kind, 0, Priority.LOAD, NO_BLOCKS, slots, places=slots, tags=tags)
        assert self.unit.plane.submit(TransferGraph((op,))) is not None

    def wait(self) -> None:
        while not (ended := self.unit.plane.poll()):
            time.sleep(0.0002)
        assert ended[0].status is OpStatus.OK, ended[0].reason

    def put(self, keys: Keys) -> None:
        self.submit(OpKind.DISK_WRITE, keys, np.arange(PAGES, dtype=np.int32))
        self.wait()

    def get(self, keys: Keys) -> None:
        self.submit(OpKind.DISK_READ, keys, np.arange(PAGES, dtype=np.int32))
        self.wait()

    def names(self, keys: Keys) -> list[str]:
        return [f"raw/{key.tobytes().hex()}" for key in keys]

    def raw_put(self, keys: Keys) -> None:
        names = self.names(keys)
        for at in range(0, PAGES, 8):
            values = [[page] for page in self.sent[at : at + 8]]
            assert set(self.raw.put(names[at : at + 8], values, PATIENCE_S)) == {Outcome.OK}

    def raw_get(self, keys: Keys) -> None:
        names = self.names(keys)
        for at in range(0, PAGES, 8):
            values = [[page] for page in self.came[at : at + 8]]
            assert set(self.raw.get(names[at : at + 8], values, PATIENCE_S)) == {Outcome.OK}

    def drop(self, keys: Keys) -> None:
        self.raw.remove(self.names(keys), PATIENCE_S)
        self.unit.plane.remove(0, keys)

    def ask(self, keys: Keys) -> None:
        """Asks the remote tier which of these keys the store has, and waits for the answer."""
        self._ops += 1
        assert self.unit.plane.ask(OpId(self._ops), [keys], [False])
        while not self.unit.plane.answers():
            select.select([self._socket], [], [])  # blocks until the helper has sent something
            self.unit.plane.poll()

    def raw_ask(self, keys: Keys) -> None:
        self.raw.exists(self.names(keys), PATIENCE_S)


def seconds(call: Callable[..., None], *arguments: Any) -> float:
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def rates(rig: Rig, rounds: int) -> dict[str, float]:
    """Returns median GB/s over all rounds. The tier and the raw client take turns at going first."""
    times: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        keys = chain(f"round {number}", PAGES)
        puts = {"put": rig.put, "raw put": rig.raw_put}
        gets = {"get": rig.get, "raw get": rig.raw_get}
        order = -1 if number % 2 else 1
        for calls in (puts, gets):
            for name, call in list(calls.items())[::order]:
                taken = seconds(call, keys)
                if number:
                    times.setdefault(name, []).append(taken)
        assert (rig.came == rig.sent).all()
        rig.drop(keys)
    return {name: PAGES * PAGE_BYTES / statistics.median(taken) / 1e9 for name, taken in times.items()}


def percentiles(taken: Sequence[float]) -> dict[str, float]:
    ordered = sorted(taken)
    return {"p50": statistics.median(ordered) * 1e3, "p99": ordered[int(0.99 * len(ordered))] * 1e3}


def questions(rig: Rig, beside_gets: bool) -> dict[str, dict[str, float]]:
    """Returns milliseconds per question about 256 keys. The store has a quarter of these keys."""
    keys = chain("asked", ASKED)
    there = keys[:PAGES]
    rig.put(there)
    rig.raw_put(there)
    taken: dict[str, list[float]] = {"ours": [], "raw": []}
    for number in range(ASKS):
        if beside_gets and not rig.unit.plane._moving:
            rig.submit(OpKind.DISK_READ, there, np.arange(PAGES, dtype=np.int32))
        order = [("ours", rig.ask), ("raw", rig.raw_ask)][:: -1 if number % 2 else 1]
        for name, call in order:
            taken[name].append(seconds(call, keys))
        rig.unit.plane.poll()
    while rig.unit.plane._moving:
        rig.unit.plane.poll()
    rig.drop(there)
    return {name: percentiles(values) for name, values in taken.items()}


def lookups(url: str) -> dict[str, float]:
    """Returns the median microseconds that the scheduler's thread spends on a lookup of 256 blocks that no tier has."""
    runs = (4096,)
    units = {
        "without": RemoteUnit("none", Shape(ranks=1, runs=runs)),
        "with": RemoteUnit(url, Shape(ranks=1, runs=runs), remote__probe_s=1.0),
        "open": RemoteUnit(url, Shape(ranks=1, runs=runs)),
    }
    units["with"].up()
    units["open"].plane.link.breaker.lost("for the benchmark", 1e12)
    units["open"].tier.poll(0.0)
    taken: dict[str, list[float]] = {name: [] for name in units}
    for number in range(LOOKUPS):
        keys = [chain(f"lookup {number}", ASKED)]
        for name, unit in units.items():
            request = f"r{number}"
            start = time.perf_counter()
            unit.manager.match(request, keys, 0)
            if name != "with":
                taken[name].append(time.perf_counter() - start)
                unit.manager.end_request(request)
                continue
            begun = time.perf_counter() - start
            unit.poll_until(lambda: not unit.manager.waits(request), "an answer")  # noqa: B023 - called at once
            start = time.perf_counter()
            unit.manager.match(request, keys, 0)
            taken[name].append(begun + time.perf_counter() - start)
            unit.manager.end_request(request)
    for unit in units.values():
        unit.close()
    return {name: statistics.median(values) * 1e6 for name, values in taken.items()}


def measure(url: str, rounds: int) -> dict[str, Any]:
    rig = Rig(url)
    result = {
        "gb_per_s": rates(rig, rounds),
        "question_ms": questions(rig, beside_gets=False),
        "question_beside_gets_ms": questions(rig, beside_gets=True),
    }
    rig.raw.close()
    rig.unit.close()
    return {**result, "lookup_us": lookups(url)}


def run(store: str, rounds: int) -> dict[str, Any]:
    """Starts the store's servers, and then this program again as a client of them. Returns the result of that
    program.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        result = folder / "result.json"
        program = [
            sys.executable,
            "-m",
            "benchmarks.remote_tier",
            "--json",
            str(result),
            "--rounds",
            str(rounds),
        ]
        if store == "redis":
            server = stack.enter_context(redis_server(folder))
            command = [*program, "--url", server.url]
        else:
            namespace = Namespace()
            stack.callback(namespace.close)
            master, _ = stack.enter_context(mooncake(namespace, folder, 512))
            command = namespace.command([*program, "--url", master.url])
        with (folder / "log").open("wb") as log:
            subprocess.run(command, env={**CLIENT_ENVIRONMENT, **os.environ}, stderr=log, check=True)
        measured: dict[str, Any] = json.loads(result.read_text())
        return measured


def show(store: str, measured: dict[str, Any]) -> None:
    table = Table(title=f"{store}: pages of 2 MiB, questions of {ASKED} keys")
    for column in ("what", "flexkv", "raw", "ratio or more", "bar"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for name, bar in (("get", GET_BAR), ("put", PUT_BAR)):
        ours, raw = measured["gb_per_s"][name], measured["gb_per_s"][f"raw {name}"]
        table.add_row(f"{name}, GB/s", f"{ours:.2f}", f"{raw:.2f}", f"{ours / raw:.2f}", f"{bar}")
    idle, beside = measured["question_ms"], measured["question_beside_gets_ms"]
    more = idle["ours"]["p50"] - idle["raw"]["p50"]
    table.add_row(
        "question, p50 ms",
        f"{idle['ours']['p50']:.2f}",
        f"{idle['raw']['p50']:.2f}",
        f"+{more:.2f}",
        f"+{PROBE_BAR_MS}",
    )
    ratio = beside["ours"]["p99"] / beside["raw"]["p99"]
    table.add_row(
        "beside gets, p99 ms",
        f"{beside['ours']['p99']:.2f}",
        f"{beside['raw']['p99']:.2f}",
        f"{ratio:.2f}",
        f"{P99_BAR}",
    )
    us = measured["lookup_us"]
    for name, bar in (("with", LOOKUP_BAR_US), ("open", OPEN_BAR_US)):
        label = "lookup, us" if name == "with" else "lookup, breaker open, us"
        table.add_row(
            label, f"{us[name]:.1f}", f"{us['without']:.1f}", f"+{us[name] - us['without']:.1f}", f"+{bar:g}"
        )
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--rounds", type=at_least_one, default=9)
    parser.add_argument("--store", choices=STORES, help="both without")
    parser.add_argument("--url", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.url:
        arguments.json.write_text(json.dumps(measure(arguments.url, arguments.rounds)))
        return
    results: dict[str, Any] = {}
    for store in (arguments.store,) if arguments.store else STORES:
        try:
            results[store] = run(store, arguments.rounds)
        except NoNamespace as error:
            print(f"{store} left out: no network namespace can be made here: {error}")
            continue
        show(store, results[store])
    if arguments.json:
        facts = {"page_bytes": PAGE_BYTES, "pages": PAGES, "cpus": os.cpu_count(), "load": os.getloadavg()}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({**facts, **results}, indent=2))


if __name__ == "__main__":
    main()
