"""Compares flexkv's client of Mooncake Store with raw calls of Mooncake's library, in the same rounds.

The program puts and gets values of 2 MiB in batches of 8, and asks `exists` for 256 names. The master and one process
that provides the store's memory run in a network namespace on this machine. "registered" is the library's own get into
memory that was registered with the library. Prints medians, and ratios to the raw calls; `--json PATH` writes them to a
file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arguments import at_least_one
from flexkv.remote.base import Outcome, Presence, StoreOptions
from flexkv.remote.mooncake import CLIENT_ENVIRONMENT, MooncakeStore
from tests.servers.mooncake import mooncake
from tests.servers.namespace import Namespace, NoNamespace

VALUE_BYTES = 2 << 20
VALUES = 64
BATCH = 8
NAMES = 256
ASKS = 50
"""Number of `exists` calls per round."""
PATIENCE_S = 60.0
SEGMENT_MIB = 512

Method = Callable[[], None]


class Bench:
    """flexkv's client and the library's client of one store, and the memory that both use: uint8 [VALUES,
    VALUE_BYTES] to put, and the same to get.
    """

    def __init__(self, url: str) -> None:
        from mooncake.store import MooncakeDistributedStore

        self.ours = MooncakeStore(StoreOptions((url,)))
        self.raw = MooncakeDistributedStore()
        code = self.raw.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", url.removeprefix("mooncake://"))
        assert code == 0, code
        self.sent = np.random.default_rng(0).integers(0, 256, (VALUES, VALUE_BYTES), dtype=np.uint8)
        self.came = np.zeros_like(self.sent)
        self.registered = np.zeros_like(self.sent)
        assert self.raw.register_buffer(self.registered.ctypes.data, self.registered.nbytes) == 0
        self.names = [f"value/{number}" for number in range(VALUES)]
        self.asked = self.names + [f"absent/{number}" for number in range(NAMES - VALUES)]

    def our_put(self) -> None:
        for at in range(0, VALUES, BATCH):
            values = [[page] for page in self.sent[at : at + BATCH]]
            assert set(self.ours.put(self.names[at : at + BATCH], values, PATIENCE_S)) == {Outcome.OK}

    def our_get(self) -> None:
        for at in range(0, VALUES, BATCH):
            values = [[page] for page in self.came[at : at + BATCH]]
            assert set(self.ours.get(self.names[at : at + BATCH], values, PATIENCE_S)) == {Outcome.OK}

    def our_exists(self) -> None:
        for _ in range(ASKS):
            assert self.ours.exists(self.asked, PATIENCE_S).count(Presence.YES) == VALUES

    def raw_move(self, call: Callable[..., list[int]], memory: np.ndarray[Any, Any], expected: int) -> None:
        base = memory.ctypes.data
        for at in range(0, VALUES, BATCH):
            addresses = [base + number * VALUE_BYTES for number in range(at, at + BATCH)]
            assert set(call(self.names[at : at + BATCH], addresses, [VALUE_BYTES] * BATCH)) == {expected}

    def raw_put(self) -> None:
        self.raw_move(self.raw.batch_put_from, self.sent, 0)

    def raw_get(self) -> None:
        self.raw_move(self.raw.batch_get_into, self.came, VALUE_BYTES)

    def raw_get_registered(self) -> None:
        self.raw_move(self.raw.batch_get_into, self.registered, VALUE_BYTES)

    def raw_exists(self) -> None:
        for _ in range(ASKS):
            assert self.raw.batch_is_exist(self.asked).count(1) == VALUES

    def forget(self) -> None:
        """Removes all values, because the store does not accept a second value under the same name."""
        assert all(self.ours.remove(self.names, PATIENCE_S))


def seconds(method: Method) -> float:
    start = time.perf_counter()
    method()
    return time.perf_counter() - start


def measure(url: str, rounds: int) -> dict[str, Any]:
    """Returns the medians over all rounds. flexkv's client and the raw client take turns at going first."""
    bench = Bench(url)
    times: dict[str, list[float]] = {}
    puts = {"put ours": bench.our_put, "put raw": bench.raw_put}
    others = {
        "get ours": bench.our_get,
        "get raw": bench.raw_get,
        "get registered": bench.raw_get_registered,
        "exists ours": bench.our_exists,
        "exists raw": bench.raw_exists,
    }
    for number in range(rounds + 1):
        order = -1 if number % 2 else 1
        taken: dict[str, float] = {}
        for name, method in list(puts.items())[::order]:
            bench.forget()
            taken[name] = seconds(method)
        taken |= {name: seconds(method) for name, method in list(others.items())[::order]}
        assert (bench.came == bench.sent).all()
        if number:  # not the first round, which also connects and maps memory
            for name, value in taken.items():
                times.setdefault(name, []).append(value)
    bench.raw.close()
    bench.ours.close()
    median = {name: statistics.median(values) for name, values in times.items()}
    moved = VALUES * VALUE_BYTES
    return {
        "gb_per_s": {n: moved / s / 1e9 for n, s in median.items() if not n.startswith("exists")},
        "exists_ms": {n: s / ASKS * 1e3 for n, s in median.items() if n.startswith("exists")},
        "ratio_get": median["get raw"] / median["get ours"],
        "ratio_put": median["put raw"] / median["put ours"],
        "ratio_exists": median["exists raw"] / median["exists ours"],
        "ratio_registered": median["get raw"] / median["get registered"],
    }


def run_inside(namespace: Namespace, rounds: int) -> dict[str, Any]:
    """Starts the servers in the network namespace, and then this program again in the same namespace. Returns the
    result of that program.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        mooncake(namespace, Path(folder), SEGMENT_MIB) as (master, _),
    ):
        program = [sys.executable, "-m", "benchmarks.remote_mooncake", "--url", master.url]
        result = Path(folder, "result.json")
        command = namespace.command([*program, "--json", str(result), "--rounds", str(rounds)])
        with Path(folder, "log").open("wb") as log:
            subprocess.run(command, env={**CLIENT_ENVIRONMENT, **os.environ}, stderr=log, check=True)
        measured: dict[str, Any] = json.loads(result.read_text())
        return measured


def show(results: dict[str, Any]) -> None:
    rates, exists = results["gb_per_s"], results["exists_ms"]
    print(f"{'':24}{'flexkv':>10}{'raw':>10}{'ratio':>10}")
    for name in ("get", "put"):
        ours, raw = rates[f"{name} ours"], rates[f"{name} raw"]
        print(f"{name + ' GB/s':24}{ours:10.2f}{raw:10.2f}{results[f'ratio_{name}']:9.2f}x")
    print(
        f"{'get registered GB/s':24}{'':10}{rates['get registered']:10.2f}{results['ratio_registered']:9.2f}x"
    )
    ours, raw = exists["exists ours"], exists["exists raw"]
    print(f"{f'exists of {NAMES} ms':24}{ours:10.3f}{raw:10.3f}{results['ratio_exists']:9.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--rounds", type=at_least_one, default=9)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.url:
        arguments.json.write_text(json.dumps(measure(arguments.url, arguments.rounds)))
        return
    try:
        namespace = Namespace()
    except NoNamespace as error:
        sys.exit(f"no network namespace can be made here, and Mooncake listens on all interfaces: {error}")
    try:
        results = run_inside(namespace, arguments.rounds)
    finally:
        namespace.close()
    show(results)
    if arguments.json:
        facts = {"value_bytes": VALUE_BYTES, "batch": BATCH, "rounds": arguments.rounds}
        report = {**facts, "cpus": os.cpu_count(), "load": os.getloadavg(), **results}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
