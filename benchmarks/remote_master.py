"""Measures the cost of a key in Mooncake's master process: CPU time per key for put, get and exists, and memory per
key.

The master and one process that provides the store's memory run in a network namespace on this machine. Values are
small, because they do not pass through the master. Key names and batch sizes are like those of flexkv's remote tier.
`--json PATH` writes the result to a file.

    python -m benchmarks.remote_master [--keys 40000]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from flexkv.remote.base import Outcome, Presence, StoreOptions
from flexkv.remote.mooncake import CLIENT_ENVIRONMENT, MooncakeStore
from tests.servers.mooncake import mooncake
from tests.servers.namespace import Namespace, NoNamespace

VALUE_BYTES = 1024
BATCH = 8
NAMES = 256
PATIENCE_S = 60.0
SEGMENT_MIB = 512
ROUNDS = 3


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(url: str, pid: int, keys: int) -> dict[str, float]:
    """Calls the master at `url`, whose process id is `pid`. Returns its CPU time per key in microseconds, its memory
    per key in bytes, and its CPU share when idle.
    """
    store = MooncakeStore(StoreOptions((url,)))
    memory = np.zeros((BATCH, VALUE_BYTES), np.uint8)
    names = [f"flexkv/1/{'0' * 32}/0/{number:032x}" for number in range(keys)]
    absent = [f"flexkv/1/{'1' * 32}/0/{number:032x}" for number in range(keys)]
    values = [[row] for row in memory]

    def put(part: list[str]) -> None:
        assert set(store.put(part, values[: len(part)], PATIENCE_S)) == {Outcome.OK}

    def get(part: list[str]) -> None:
        assert set(store.get(part, values[: len(part)], PATIENCE_S)) == {Outcome.OK}

    def exists(part: list[str], expected: Presence) -> None:
        assert set(store.exists(part, PATIENCE_S)) == {expected}

    def cost_us(call: Callable[[list[str]], None], some: list[str], batch: int, rounds: int = 1) -> float:
        began_s = cpu_s(pid)
        for _ in range(rounds):
            for first in range(0, len(some), batch):
                call(some[first : first + batch])
        return (cpu_s(pid) - began_s) / len(some) / rounds * 1e6

    put(names[:BATCH])
    before = resident_bytes(pid)
    found = {"put": cost_us(put, names[BATCH:], BATCH)}
    found["bytes_a_key"] = (resident_bytes(pid) - before) / (keys - BATCH)
    found["get"] = cost_us(get, names, BATCH)
    found["exists_present"] = cost_us(lambda part: exists(part, Presence.YES), names, NAMES, 5 * ROUNDS)
    found["exists_absent"] = cost_us(lambda part: exists(part, Presence.NO), absent, NAMES, 5 * ROUNDS)
    found["exists_present_of_8"] = cost_us(lambda part: exists(part, Presence.YES), names, BATCH, ROUNDS)
    began_s, idle_s = time.monotonic(), cpu_s(pid)
    time.sleep(1.0)
    found["idle_share_of_a_core"] = (cpu_s(pid) - idle_s) / (time.monotonic() - began_s)
    store.close()
    return found


def run_inside(keys: int) -> dict[str, float]:
    """Starts the servers in a network namespace, and then this program again in the same namespace. Returns the
    result of that program.
    """
    namespace = Namespace()
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            mooncake(namespace, Path(folder), SEGMENT_MIB) as (master, _),
        ):
            result = Path(folder, "result.json")
            program = [sys.executable, "-m", "benchmarks.remote_master", "--keys", str(keys)]
            program += ["--url", master.url, "--pid", str(master.pid), "--json", str(result)]
            with Path(folder, "log").open("wb") as log:
                subprocess.run(
                    namespace.command(program),
                    env={**CLIENT_ENVIRONMENT, **os.environ},
                    stderr=log,
                    stdout=log,
                    check=True,
                )
            measured: dict[str, float] = json.loads(result.read_text())
            return measured
    finally:
        namespace.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", type=int, default=40_000)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--pid", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    try:
        found = measure(asked.url, asked.pid, asked.keys) if asked.url else run_inside(asked.keys)
    except NoNamespace as error:
        print(f"nothing measured: no network namespace can be made here: {error}")
        return
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(found, indent=2) + "\n")
    table = Table("what", "master", box=None)
    for what, value in found.items():
        table.add_row(what, f"{value:.0f} bytes" if "bytes" in what else f"{value:.2f}")
    Console().print(table)
    print("us of CPU time a name where nothing else is said")


if __name__ == "__main__":
    main()
