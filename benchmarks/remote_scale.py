"""Simulates units that share a store. (A unit is the ranks of an engine that share one cache manager.) Counts, per
request, the calls of the store, the names in these calls, the puts and the gets, and compares the counts with the
formulas of docs/scale.md.

Each unit has host memory for some blocks, and the units share one store with space for more. The units and the store
evict the least recently used blocks. Requests are the turns of conversations (each turn's prompt consists of the
previous prompt, its answer, and new blocks), or they come from a trace with `hash_ids` and `timestamp`, as in
Mooncake's traces. Each request goes to a unit drawn at random. The rules for lookups, remembered answers, chunks of
questions, and puts are those of flexkv's remote tier, with its constants. Transfers take no simulated time. `--json
PATH` writes the result to a file.

    python -m benchmarks.remote_scale [--units 8] [--trace FILE]
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from flexkv.cache.tiers.remote.tier import ABSENT_S, HINT_S, KNOWN_PAGES
from flexkv.remote.helper.prober import CHUNK

POLICIES = ("off", "reuse", "through")
SYSTEM_PROMPTS, SYSTEM_BLOCKS = 8, 64
MOST_TURNS = 8
USER_BLOCKS, ANSWER_BLOCKS = (10, 60), (5, 30)
PAUSE_S = (5.0, 60.0)
"""Seconds between the turns of a conversation."""


class Request(NamedTuple):
    at_s: float
    blocks: Sequence[int]


class Memory:
    """The blocks in one memory, which evicts the least recently used ones when it is full."""

    def __init__(self, blocks: int) -> None:
        self._most = blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def leading(self, blocks: Sequence[int]) -> int:
        """Returns how many leading blocks this memory has, and marks them as used."""
        for number, block in enumerate(blocks):
            if block not in self._blocks:
                return number
            self._blocks.move_to_end(block)
        return len(blocks)

    def has(self, block: int) -> bool:
        return block in self._blocks

    def add(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):  # so that the end of a prefix is evicted before its start
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)


class Unit:
    """One unit. It behaves like flexkv/cache/tiers/remote and the helper process of that tier."""

    def __init__(self, host_blocks: int, store: Memory, policy: str, counts: Counter[str]) -> None:
        self._host, self._store, self._policy, self._counts = Memory(host_blocks), store, policy, counts
        self._there: OrderedDict[int, float] = OrderedDict()
        """Blocks that the store is assumed to have. The value is the time, in seconds, at which this assumption ends.
        """
        self._absent: dict[int, float] = {}

    def serve(self, request: Request) -> None:
        counts, now_s, blocks = self._counts, request.at_s, request.blocks
        counts["requests"] += 1
        counts["blocks"] += len(blocks)
        in_host = self._host.leading(blocks)
        counts["host"] += in_host
        got = self._fetch(blocks[in_host:], now_s) if self._policy != "off" else 0
        counts["got"] += got
        if self._policy == "reuse":
            self._put(blocks[:in_host], now_s)
        self._host.add(blocks)
        if self._policy == "through":
            self._put(blocks[in_host + got :], now_s)

    def _fetch(self, blocks: Sequence[int], now_s: float) -> int:
        """Asks the store for blocks as flexkv's remote tier does. Returns how many leading blocks the store
        delivers.
        """
        counts = self._counts
        counts["lacked"] += len(blocks)
        known = next(
            (n for n, block in enumerate(blocks) if self._there.get(block, 0.0) <= now_s), len(blocks)
        )
        asked = blocks[known:]
        if asked and self._absent.get(asked[0], 0.0) <= now_s:
            counts["questions"] += 1
            for first in range(0, len(asked), CHUNK):
                part = asked[first : first + CHUNK]
                counts["calls"] += 1
                counts["names"] += len(part)
                found = [self._store.has(block) for block in part]
                for block, there in zip(part, found, strict=True):
                    if there:
                        self._remember(block, now_s)
                    else:
                        self._absent[block] = now_s + ABSENT_S
                        self._there.pop(block, None)
                known += found.index(False) if False in found else len(part)
                if False in found:
                    break
        return self._store.leading(blocks[:known])

    def _remember(self, block: int, now_s: float) -> None:
        self._there[block] = now_s + HINT_S
        self._there.move_to_end(block)
        if len(self._there) > KNOWN_PAGES:
            self._there.popitem(last=False)

    def _put(self, blocks: Sequence[int], now_s: float) -> None:
        """Puts blocks into the store. Leaves out the blocks that the store is assumed to have, and those that the
        store, when asked, reports to have.
        """
        new = [block for block in blocks if block not in self._there]
        self._counts["names_of_puts"] += len(new)
        put = [block for block in new if not self._store.has(block)]
        self._counts["put"] += len(put)
        self._store.add(put)
        for block in new:
            self._remember(block, now_s)


def conversations(requests: int, rate: float, seed: int = 0) -> list[Request]:
    """Returns requests of random conversations, about `rate` per second, ordered by time."""
    rng = np.random.default_rng(seed)
    found: list[Request] = []
    fresh = SYSTEM_PROMPTS * SYSTEM_BLOCKS
    turns_mean = (1 + MOST_TURNS) / 2
    start_s = 0.0
    while len(found) < requests:
        start_s += float(rng.exponential(turns_mean / rate))
        at_s = start_s
        system = int(rng.integers(SYSTEM_PROMPTS)) * SYSTEM_BLOCKS
        blocks = list(range(system, system + SYSTEM_BLOCKS))
        for _ in range(int(rng.integers(1, MOST_TURNS + 1))):
            size = int(rng.integers(*USER_BLOCKS))
            blocks = [*blocks, *range(fresh, fresh + size)]
            fresh += size
            found.append(Request(at_s, blocks))
            answer = int(rng.integers(*ANSWER_BLOCKS))
            blocks = [*blocks, *range(fresh, fresh + answer)]
            fresh += answer
            at_s += float(rng.uniform(*PAUSE_S))
    return sorted(found[:requests])


def read_trace(path: Path) -> list[Request]:
    rows = map(json.loads, path.read_text().splitlines())
    return [Request(row["timestamp"] / 1000, row["hash_ids"]) for row in rows]


@dataclass(frozen=True)
class Result:
    """The figures of one policy. All except the shares are averages per request.

    Attributes:
        hit: share of all blocks that were hits; `from_store` is the share that came from the store.
        questions, calls, names: number of questions to the store, of the calls into which the questions are divided,
            and of the names in the questions.
        names_of_puts: number of names for which the store is asked before a put.
        predicted_calls, predicted_names: what the formulas predict for `calls` and `names`.
    """

    policy: str
    hit: float
    from_store: float
    questions: float
    calls: float
    names: float
    names_of_puts: float
    put: float
    got: float
    predicted_calls: float
    predicted_names: float


def simulate(requests: Sequence[Request], units: int, host: int, store: int, policy: str) -> Result:
    counts: Counter[str] = Counter()
    shared = Memory(store)
    served = [Unit(host, shared, policy, counts) for _ in range(units)]
    for request, number in zip(
        requests, np.random.default_rng(1).integers(units, size=len(requests)), strict=True
    ):
        served[number].serve(request)
    n = counts["requests"]
    # The formula: each request asks the store one question. A question takes one call per 256 names that the store has,
    # and one more call.
    lacked, got = counts["lacked"] / n, counts["got"] / n
    calls = 0.0 if policy == "off" else 1 + got / CHUNK
    return Result(
        policy=policy,
        hit=(counts["host"] + counts["got"]) / counts["blocks"],
        from_store=counts["got"] / counts["blocks"],
        predicted_calls=calls,
        predicted_names=min(lacked, CHUNK * calls),
        got=got,
        **{name: counts[name] / n for name in ("questions", "calls", "names", "names_of_puts", "put")},
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--units", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--host-blocks", type=int, default=8_000, help="of each unit")
    parser.add_argument("--store-blocks", type=int, default=400_000, help="of the store")
    parser.add_argument("--requests", type=int, default=5_000)
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second, of all units")
    parser.add_argument("--trace", type=Path, help="a file of requests, one JSON object a line")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    asked = parser.parse_args()
    if asked.trace is not None and not asked.trace.is_file():
        parser.error(f"no trace at {asked.trace}: nothing to simulate")
    requests = read_trace(asked.trace) if asked.trace else conversations(asked.requests, asked.rate)
    lengths = [len(request.blocks) for request in requests]
    print(
        f"{len(requests)} requests in {requests[-1].at_s - requests[0].at_s:.0f} s of {np.mean(lengths):.0f} blocks, "
        f"{len({block for request in requests for block in request.blocks})} different blocks"
    )
    headings = ("units", "write", "hit", "of the store", "questions", "calls", "formula", "names", "formula")
    table = Table(*headings, "asked for puts", "put", "got", box=None)
    rows = []
    for units in asked.units:
        for policy in POLICIES:
            row = simulate(requests, units, asked.host_blocks, asked.store_blocks, policy)
            rows.append({"units": units, **row.__dict__})
            calls = (row.questions, row.calls, row.predicted_calls)
            names = (row.names, row.predicted_names, row.names_of_puts, row.put, row.got)
            shown = [*(f"{value:.2f}" for value in calls), *(f"{value:.1f}" for value in names)]
            table.add_row(str(units), policy, f"{row.hit:.3f}", f"{row.from_store:.3f}", *shown)
    Console(width=160).print(table)
    print("a request, where nothing else is said; `off` are caches that share nothing")
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
