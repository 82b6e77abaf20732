"""Measures which share of a request trace's blocks are hits, for each eviction policy of the native index and for
several cache sizes.

Each line of a trace is a JSON object for one request, whose `hash_ids` identify its blocks in order (as in Mooncake's
traces). Requests are served one after another. Blocks that are cached are hits, and all other blocks are stored. Then
all blocks of the request count as used at the same time.

    python -m benchmarks.eviction TRACE [--blocks 1000 2000 4000]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from flexkv import c_ext
from flexkv.cache.base import NO_ENTRY

SIZES = (250, 500, 1000, 2000, 4000, 10_000, 20_000)


def read_trace(path: Path) -> list[np.ndarray]:
    """Returns the keys of each request of the trace: uint8 [blocks, 16]."""
    requests = []
    for line in path.read_text().splitlines():
        keys = np.zeros((len(ids := json.loads(line)["hash_ids"]), 16), np.uint8)
        # Spreads the ids over the keys' bits, because the index assumes that keys are random like digests.
        keys.view(np.uint64)[:] = np.array(ids, np.uint64)[:, None] * np.array(
            [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64
        )
        requests.append(keys)
    return requests


def hit_rate(requests: list[np.ndarray], policy: str, blocks: int) -> float:
    """Runs the trace through an index of `blocks` slots. Returns the share of all blocks that were cached when their
    request came.
    """
    index = c_ext.BlockIndex([blocks], policy)
    index.grow(0, blocks)
    hits = asked = 0
    for keys in requests:
        there = index.find(0, keys) != NO_ENTRY
        hits, asked = hits + int(np.count_nonzero(there)), asked + len(keys)
        entries = index.insert(0, keys, len(keys))[1]
        index.finish(entries, np.ones(len(entries), np.uint8))
        found = index.find(0, keys[there])
        index.touch(found, len(found))
        index.touch(index.find(0, keys))
    return hits / asked


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, help="a file of requests, one JSON object a line")
    parser.add_argument("--blocks", type=int, nargs="+", default=SIZES, help="sizes of the cache")
    asked = parser.parse_args()
    if not asked.trace.is_file():
        parser.error(f"no trace at {asked.trace}: nothing to measure")
    requests = read_trace(asked.trace)
    table = Table("blocks", *c_ext.eviction_policies(), box=None)
    for blocks in asked.blocks:
        rates = (hit_rate(requests, policy, blocks) for policy in c_ext.eviction_policies())
        table.add_row(str(blocks), *(f"{rate:.3f}" for rate in rates))
    Console().print(table)


if __name__ == "__main__":
    main()
