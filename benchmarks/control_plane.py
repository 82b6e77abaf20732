"""Measures the control plane on one thread with 1M cached blocks and requests of 8,192 blocks (128k tokens), and
compares it with its targets.

Prints a table. `--json PATH` also writes it to a file. `--check PATH` compares it with a file that `--json` wrote on
the same machine, and exits with status 1 if a row has become slower. Every figure is measured as wall time and as the
thread's CPU time. Other programs on the machine disturb the CPU time less than the wall time. Figures are medians and
minima over rounds. Each round uses different keys, so that the keys' index entries are not in the CPU caches. Only rows
marked "hot" reuse keys.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import pickle
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np

from benchmarks.arguments import at_least_one
from flexkv import c_ext
from flexkv.cache.base import GroupSpec, ManagerLimits, StorePlan
from flexkv.cache.keys import EngineKeyChain, TokenChain, namespace_digest
from flexkv.cache.ledger.hub import RESERVE_MAX_PAGES
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.tiers.disk.tier import DiskTier
from flexkv.cache.tiers.factory import unit_tiers
from flexkv.facts.keys import Keys
from flexkv.storage.base import DiskGroup, DiskIdentity, DiskOptions
from flexkv.storage.striped_slabs import StripedSlabs
from flexkv.transfer.graph import OpResult, OpStatus

CACHED_BLOCKS = 1 << 20
REQUEST_BLOCKS = 8192
SHORT_BLOCKS = 64
"""Number of blocks of a short request. Its lookup takes little more than the fixed time of any lookup."""
BLOCK_TOKENS = 16
NAMESPACE = namespace_digest({"model": "benchmark"})
OK = np.empty(0, np.int32)
P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class Row:
    name: str
    target_us: float | None
    wall_median_us: float
    wall_min_us: float
    cpu_median_us: float
    cpu_min_us: float


SLOWER = 1.3
"""`--check` reports a row as slower if its minimum CPU time grew by more than this factor. On a shared machine, even
runs of the same code differ by some 15 %.
"""

LEAST_US = 2.0
"""Microseconds of CPU time. `--check` does not compare rows below this, because a single cache miss can change them
noticeably.
"""


def slower_rows(rows: Sequence[Row], before: Mapping[str, Any]) -> list[str]:
    """Returns one line for each row that has become slower than in a saved run, and for each row that only one of the
    two runs has.

    Args:
        before: the content of the file that `--json` wrote in the saved run.
    """
    saved = {row["name"]: float(row["cpu_min_us"]) for row in before["rows"]}
    lines = [f"{row.name}: not in the saved run" for row in rows if row.name not in saved]
    for row in rows:
        was = saved.get(row.name, float("inf"))
        if row.cpu_min_us > LEAST_US and row.cpu_min_us > SLOWER * was:
            lines.append(f"{row.name}: {row.cpu_min_us:.1f} us, before {was:.1f}")
    lines += [f"{name}: was not measured" for name in saved.keys() - {row.name for row in rows}]
    return lines


class Stopwatch:
    """Collects the wall time and the CPU time of each call made through `time`, in microseconds."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def time(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        gc.disable()
        cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
        result = work(*args, **kwargs)
        wall, cpu = time.perf_counter_ns() - wall, time.thread_time_ns() - cpu
        gc.enable()
        self.wall.append(wall / 1e3)
        self.cpu.append(cpu / 1e3)
        return result

    def row(self, name: str, target_us: float | None) -> Row:
        median = statistics.median
        return Row(name, target_us, median(self.wall), min(self.wall), median(self.cpu), min(self.cpu))


def random_keys(count: int, seed: int) -> Keys:
    return np.random.default_rng(seed).integers(0, 256, (count, 16), dtype=np.uint8)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def new_manager() -> LocalCacheManager:
    """Returns a manager with slots for CACHED_BLOCKS blocks, and with further slots for the reserve that a manager
    keeps free.
    """
    slots = CACHED_BLOCKS + RESERVE_MAX_PAGES
    manager = LocalCacheManager([GroupSpec(BLOCK_TOKENS, slots)], ManagerLimits(), tiers=unit_tiers())
    manager.grow(0, slots)
    return manager


def plan_store(manager: LocalCacheManager, keys: Keys, blocks: np.ndarray, name: str) -> StorePlan:
    plan = manager.begin_store(name, 0, keys, blocks, 0)
    pickle.dumps(plan.graph, -1)
    return plan


def plan_load(manager: LocalCacheManager, blocks: np.ndarray, name: str) -> bytes:
    return pickle.dumps(manager.begin_load(name, [blocks]), -1)


def store(manager: LocalCacheManager, keys: Keys, blocks: np.ndarray, name: str, watch: Stopwatch) -> None:
    plan = watch.time(plan_store, manager, keys, blocks, name)
    assert plan.graph is not None
    assert len(plan.stored) == len(keys)
    done = manager.complete(0, OpResult(plan.graph.ops[0].op_id, OpStatus.OK, OK))
    assert done is not None
    assert len(done.published) == len(keys)


def bench_manager(rounds: int) -> tuple[list[Row], float]:
    """Times lookups, and the planning of loads and stores, through the complete manager, Python included. Returns the
    rows, and the memory per cached block in bytes.
    """
    manager = new_manager()
    keys = random_keys(CACHED_BLOCKS, 0)
    blocks = np.arange(REQUEST_BLOCKS, dtype=np.int32)
    before, fill = resident_bytes(), Stopwatch()
    for at in range(0, CACHED_BLOCKS, REQUEST_BLOCKS):
        store(manager, keys[at : at + REQUEST_BLOCKS], blocks, f"fill{at}", fill)
        manager.release(f"fill{at}")
    bytes_a_block = (resident_bytes() - before) / CACHED_BLOCKS
    starts = random.Random(1).sample(range(0, CACHED_BLOCKS, REQUEST_BLOCKS), min(rounds, 100))
    chains = [keys[at : at + REQUEST_BLOCKS] for at in starts]
    rows = [fill.row("plan a store of 8,192 into free slots, graph pickled", 300)]

    def match_all(lists: list[Keys], name: str, target_us: float) -> None:
        watch = Stopwatch()
        for number, wanted in enumerate(lists):
            request = f"m{number}"
            result = watch.time(manager.match, request, [wanted], 0)
            assert result.blocks == REQUEST_BLOCKS
            manager.release(request)
        rows.append(watch.row(name, target_us))

    match_all(chains, "match 8,192 stored together, with slots and lease", 40)
    match_all([chains[0]] * len(chains), "the same, hot", 40)
    rows.append(bench_short_match(manager, chains[0][:SHORT_BLOCKS], 20 * rounds))

    load, store_plan = Stopwatch(), Stopwatch()
    for number, wanted in enumerate(chains):
        request = f"l{number}"
        manager.match(request, [wanted], 0)
        data = load.time(plan_load, manager, blocks, request)
        op = pickle.loads(data).ops[0]
        manager.complete(0, OpResult(op.op_id, OpStatus.OK, OK))
        manager.release(request)
    rows.append(load.row("plan a load of 8,192, graph pickled", 300))

    whole = Stopwatch()
    for number in range(len(chains)):
        fresh, request = random_keys(REQUEST_BLOCKS, 1000 + number), f"s{number}"
        plan = store_plan.time(plan_store, manager, fresh, blocks, request)
        assert plan.graph is not None
        result = OpResult(plan.graph.ops[0].op_id, OpStatus.OK, OK)
        whole.time(manager.complete, 0, result)
        manager.release(request)
    rows.append(store_plan.row("plan a store of 8,192 into a full cache, graph pickled", 300))
    rows.append(whole.row("complete a store of 8,192, evicting as many for the next", None))
    rows.append(bench_bursts(manager, blocks, rounds))
    return rows, bytes_a_block


def evict_all(manager: LocalCacheManager) -> None:
    """Evicts all blocks without leases from host memory. Blocks on disk stay there."""
    manager.hub.presence.evict(0, CACHED_BLOCKS)


def bench_disk_lookup(rounds: int) -> list[Row]:
    """Times four calls per round. The first is a lookup that finds all blocks of a request on disk and none in host
    memory, and plans the read. The others are the completion of that read, the next lookup of the same request, and a
    lookup of the same blocks by a different request.

    The disk tier is the real one, and its journal runs. No page is written or read, so the slabs stay sparse.
    """
    requests = 16
    blocks = requests * REQUEST_BLOCKS
    geometry = DiskGroup("benchmark", (4096,), (np.array([[0, 4096, 0]]),), BLOCK_TOKENS)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        options = DiskOptions((blocks + 1024) * 8192, preallocate=False)
        identity = DiskIdentity("benchmark", bytes(32))
        tier = StripedSlabs.open([Path(folder)], identity, [geometry], options)
        manager = LocalCacheManager(
            [GroupSpec(BLOCK_TOKENS, blocks)], ManagerLimits(), tiers=unit_tiers(tier)
        )
        manager.grow(0, blocks)
        keys = random_keys(blocks, 7)
        index = manager.tiers[1]
        assert isinstance(index, DiskTier)
        tokens = np.full(REQUEST_BLOCKS, BLOCK_TOKENS, np.int32)
        chains = [keys[at : at + REQUEST_BLOCKS] for at in range(0, blocks, REQUEST_BLOCKS)]
        for chain in chains:
            entries = index.begin_write(0, chain, tokens, REQUEST_BLOCKS)[1]
            index.end_write(0, entries, np.ones(REQUEST_BLOCKS, np.bool_))
        disk, ended, again, host = Stopwatch(), Stopwatch(), Stopwatch(), Stopwatch()
        for number in range(rounds):
            chain, request = chains[number % requests], f"d{number}"
            evict_all(manager)
            result = disk.time(manager.match, request, [chain], 0)
            ((_, graph),) = manager.work.take_planned()
            assert (result.blocks, graph.ops[0].pages) == (0, REQUEST_BLOCKS)
            ended.time(manager.work.complete, OpResult(graph.ops[0].op_id, OpStatus.OK, OK))
            assert again.time(manager.match, request, [chain], 0).blocks == REQUEST_BLOCKS
            manager.release(request)
            assert host.time(manager.match, "other", [chain], 0).blocks == REQUEST_BLOCKS
            manager.release("other")
        rows.append(host.row("match 8,192 in host memory, a disk tier behind it", 40))
        rows.append(disk.row("match 8,192 on disk and plan their read", None))
        rows.append(ended.row("take the end of that read", None))
        rows.append(again.row("ask again after the wait for it", 12))
        tier.close(10.0)
    return rows


def bench_short_match(manager: LocalCacheManager, keys: Keys, rounds: int) -> Row:
    """Times lookups of a short request. They show the fixed cost of a lookup, which does not depend on the request's
    length."""
    watch = Stopwatch()
    for number in range(rounds):
        request = f"short{number}"
        result = watch.time(manager.match, request, [keys], 0)
        assert result.blocks == len(keys)
        manager.release(request)
    return watch.row(f"match {len(keys)} blocks, with slots and lease", None)


def bench_bursts(manager: LocalCacheManager, blocks: np.ndarray, rounds: int) -> Row:
    """Times the planning of a store while other stores in flight hold all free slots, so that planning must evict
    blocks.
    """
    watch = Stopwatch()
    for number in range(rounds):
        before = manager.stats().evicted_blocks
        reserve = manager.free_slots(0) // REQUEST_BLOCKS
        plans = [
            plan_store(manager, random_keys(REQUEST_BLOCKS, 5000 + 8 * number + i), blocks, f"b{number}.{i}")
            for i in range(reserve)
        ]
        fresh = random_keys(REQUEST_BLOCKS, 5007 + 8 * number)
        last = watch.time(plan_store, manager, fresh, blocks, f"b{number}.last")
        assert isinstance(last, StorePlan)
        assert manager.stats().evicted_blocks - before >= REQUEST_BLOCKS - REQUEST_BLOCKS // 8
        for plan in [*plans, last]:
            assert plan.graph is not None
            manager.complete(0, OpResult(plan.graph.ops[0].op_id, OpStatus.OK, OK))
        for name in [*(f"b{number}.{i}" for i in range(reserve)), f"b{number}.last"]:
            manager.release(name)
    return watch.row("the same plan, with nothing in reserve", 300)


def bench_index(rounds: int) -> list[Row]:
    """Times the native index alone: insertions into free slots, lookups of scattered blocks, and evictions of single
    blocks.
    """
    keys = random_keys(CACHED_BLOCKS, 2)
    insert, publish = Stopwatch(), Stopwatch()
    rows = []
    flags = np.ones(REQUEST_BLOCKS, np.uint8)
    index = c_ext.BlockIndex([CACHED_BLOCKS])
    index.grow(0, CACHED_BLOCKS)
    for at in range(0, CACHED_BLOCKS, REQUEST_BLOCKS):
        part = keys[at : at + REQUEST_BLOCKS]
        entries = insert.time(index.insert, 0, part, len(part))[1]
        publish.time(index.finish, entries, flags)
    rows.append(insert.row("insert 8,192 into the index", 250))
    rows.append(publish.row("make them visible", None))
    index.check_integrity(np.empty(0, np.uint32))

    single = c_ext.BlockIndex([CACHED_BLOCKS])
    single.grow(0, CACHED_BLOCKS)
    order = np.random.default_rng(3).permutation(CACHED_BLOCKS)
    one = np.ones(1, np.uint8)
    for i in order:
        single.finish(single.insert(0, keys[i : i + 1], 1)[1], one)
    scattered = Stopwatch()
    shuffled = np.random.default_rng(4).permutation(CACHED_BLOCKS)
    for number in range(min(rounds, CACHED_BLOCKS // REQUEST_BLOCKS)):
        chosen = shuffled[number * REQUEST_BLOCKS :][:REQUEST_BLOCKS]
        wanted = np.ascontiguousarray(keys[chosen])
        found = scattered.time(single.match_and_pin, 0, wanted)[0]
        assert len(found) == REQUEST_BLOCKS
        single.unpin(found)
    rows.append(scattered.row("match 8,192 single blocks in random order, with slots and lease", 300))

    for name, target in (("stored together", index), ("single blocks", single)):
        evict = Stopwatch()
        fresh = random_keys(2000, 5)
        for i in range(len(fresh)):
            done = evict.time(target.insert, 0, fresh[i : i + 1], 1)
            assert len(done[3]) == 1
            target.finish(done[1], one)
        rows.append(evict.row(f"evict one block with 1M cached, {name}", 5))
    return rows


def full_index(keys: Keys) -> c_ext.BlockIndex:
    """Returns an index with the keys `keys`. The keys are inserted REQUEST_BLOCKS at a time, as a store of a complete
    request inserts them.
    """
    index = c_ext.BlockIndex([len(keys)])
    index.grow(0, len(keys))
    flags = np.ones(REQUEST_BLOCKS, np.uint8)
    for at in range(0, len(keys), REQUEST_BLOCKS):
        index.finish(index.insert(0, keys[at : at + REQUEST_BLOCKS], REQUEST_BLOCKS)[1], flags)
    return index


def in_turns(first: Keys, second: Keys, blocks: int) -> Keys:
    """Returns the keys of a request whose blocks come alternately from two chains: `blocks` blocks of the first chain,
    as many of the second, and so on. Each chain's blocks come in order, from the beginning of the chain.
    """
    parts = (chain[: len(chain) // 2].reshape(-1, 1, blocks, 16) for chain in (first, second))
    return np.ascontiguousarray(np.concatenate(list(parts), 1).reshape(-1, 16))


def bench_tier_lookup(rounds: int) -> list[Row]:
    """Times the native lookup in host memory and up to two tiers behind it, with 1M blocks each. For comparison, also
    times `match_and_pin` of the index of host memory alone. In each round all calls use the same keys, so that the
    minima of the calls can be compared.
    """
    tiers = [random_keys(CACHED_BLOCKS, seed) for seed in (11, 12, 13)]
    indexes = [full_index(keys) for keys in tiers]
    host, lookups = indexes[0], {n: c_ext.TierLookup(indexes[:n], 1) for n in (1, 3)}
    chains = CACHED_BLOCKS // REQUEST_BLOCKS
    room = 2 * REQUEST_BLOCKS
    watches: dict[str, Stopwatch] = {}

    def look(name: str, chain: Keys, blocks: int, behind: int = 3) -> c_ext.Found:
        watch = watches.setdefault(name, Stopwatch())
        found = watch.time(lookups[behind].look, [chain], 0, room, 2**behind - 1, 0)
        assert found.blocks == blocks
        return found

    for number in range(rounds):
        at = number * 37 % chains * REQUEST_BLOCKS
        in_host, on_disk = (keys[at : at + REQUEST_BLOCKS] for keys in tiers[:2])
        # The first call of a round finds the keys' entries outside the CPU caches, so the calls take turns at being
        # first.
        plain = watches.setdefault("match and lease 8,192 of one index", Stopwatch())
        for way in np.roll((0, 1, 3), number).tolist():
            if way == 0:
                host.unpin(plain.time(host.match_and_pin, 0, in_host)[0])
                continue
            name = f"the same by a lookup over {way} tier{'s' if way > 1 else ''}"
            found = look(name, in_host, REQUEST_BLOCKS, way)
            again = watches.setdefault("count how many of them are ready now", Stopwatch())
            assert again.time(lookups[way].count_ready, found) == REQUEST_BLOCKS
            lookups[way].release(found)
        half = REQUEST_BLOCKS // 2
        mixed = {
            "a lookup of 8,192, half in host memory and half behind it": in_turns(in_host, on_disk, half),
            "a lookup of 8,192, tiers in turn every 64 blocks": in_turns(in_host, on_disk, 64),
            "a lookup of 8,192, tiers in turn every block": in_turns(in_host, on_disk, 1),
        }
        for name, chain in mixed.items():
            lookups[3].release(look(name, chain, REQUEST_BLOCKS))
        look(
            "a lookup of 8,192 of which none of 3 tiers has the first",
            random_keys(REQUEST_BLOCKS, 20_000 + number),
            0,
        )
    return [watch.row(name, None) for name, watch in watches.items()]


def bench_keys(rounds: int) -> list[Row]:
    """Times the hashing of tokens, and the computation of namespaced keys from engine keys. Each is timed for a new
    request, and for the same request after it has grown.
    """
    tokens = [random.Random(6).randrange(150_000) for _ in range(REQUEST_BLOCKS * BLOCK_TOKENS)]
    longer = tokens + tokens[: 64 * BLOCK_TOKENS]
    engine_keys = [hashlib.sha256(i.to_bytes(4, "little")).digest() for i in range(REQUEST_BLOCKS)]
    more_keys = engine_keys + engine_keys[:64]
    first, new, keyed, keyed_new = Stopwatch(), Stopwatch(), Stopwatch(), Stopwatch()
    for _ in range(rounds):
        chain, key_chain = TokenChain(BLOCK_TOKENS), EngineKeyChain(NAMESPACE, 0)
        first.time(chain.extend, tokens)
        new.time(chain.extend, longer)
        keyed.time(key_chain.extend, engine_keys)
        keyed_new.time(key_chain.extend, more_keys)
    share = 64 / REQUEST_BLOCKS
    return [
        first.row("hash 128k tokens from a list, 16 a block", 3000),
        new.row("hash 64 more blocks", 3000 * share),
        keyed.row("namespaced keys of 8,192 engine keys", 1000),
        keyed_new.row("namespaced keys of 64 more", 1000 * share),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--check", type=Path, help="compare with the results in this file")
    parser.add_argument("--rounds", type=at_least_one, default=60)
    arguments = parser.parse_args()
    manager_rows, bytes_a_block = bench_manager(arguments.rounds)
    rows = [
        *manager_rows,
        *bench_disk_lookup(arguments.rounds),
        *bench_index(arguments.rounds),
        *bench_tier_lookup(arguments.rounds),
        *bench_keys(arguments.rounds),
    ]
    print(f"{'us':<66}{'target':>8}{'median':>9}{'min':>9}{'cpu med':>9}{'cpu min':>9}")
    for row in rows:
        figures = (row.wall_median_us, row.wall_min_us, row.cpu_median_us, row.cpu_min_us)
        target = "-" if row.target_us is None else f"{row.target_us:.1f}"
        print(f"{row.name:<66}{target:>8}" + "".join(f"{f:>9.1f}" for f in figures))
    print(f"memory of the index: {bytes_a_block:.0f} bytes a block (resident set; target 200)")
    load = os.getloadavg()[0]
    print(f"load average {load:.1f} on {os.cpu_count()} CPUs; SHA instructions: {c_ext.sha256_is_native()}")
    if arguments.json:
        result = {
            "rows": [asdict(r) for r in rows],
            "index_bytes_a_block": bytes_a_block,
            "load_average": load,
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    if arguments.check:
        slower = slower_rows(rows, json.loads(arguments.check.read_text()))
        print("\n".join(["slower:", *slower] if slower else ["no row is slower"]))
        sys.exit(1 if slower else 0)


if __name__ == "__main__":
    main()
