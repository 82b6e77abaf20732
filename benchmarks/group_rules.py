"""Measures lookups of a request of 8,192 blocks in KV groups with different rules: `python -m benchmarks.group_rules`.

Each round runs all cases in turn. Each case has its own index. Besides the request's pages, the index contains seven
times as many pages of other requests. The times are compared with the lookup of one group with the rule "full" in the
same rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.arguments import at_least_one
from benchmarks.control_plane import random_keys
from flexkv.c_ext import BlockIndex, BoundaryLookup, GroupRule, TierLookup

BLOCKS = 8192
BLOCK_TOKENS = 16
OTHERS = 7 * BLOCKS
ROOM = 2**40

ALL = np.arange(BLOCKS)
FULL = GroupRule("full", BLOCK_TOKENS)
WINDOW = GroupRule("window", BLOCK_TOKENS, 64)
STATE = GroupRule("state", BLOCK_TOKENS)


@dataclass(frozen=True)
class Case:
    """KV groups, and for each group the blocks of the request that are cached (`present`). `tokens` is the length of
    the prefix that all groups together can restore.
    """

    name: str
    rules: Sequence[GroupRule]
    present: Sequence[NDArray[np.integer]]
    tokens: int

    def world(self) -> tuple[BlockIndex, BoundaryLookup, list[NDArray[np.uint8]]]:
        groups = len(self.rules)
        index = BlockIndex([BLOCKS + OTHERS] * groups)
        keys = [random_keys(BLOCKS, seed) for seed in range(groups)]
        for group in range(groups):
            index.grow(group, BLOCKS + OTHERS)
            for part in (keys[group][self.present[group]], random_keys(OTHERS, 100 + group)):
                entries = index.insert(group, part, len(part))[1]
                index.finish(entries, np.ones(len(entries), np.uint8))
        return index, BoundaryLookup(TierLookup([index], groups), self.rules, BLOCK_TOKENS), keys


CASES = (
    Case("one full group", [FULL], [ALL], BLOCKS * BLOCK_TOKENS),
    Case("full and 5 windows of 1,024 tokens", [FULL] + [WINDOW] * 5, [ALL] * 6, BLOCKS * BLOCK_TOKENS),
    Case("full and 3 states", [FULL] + [STATE] * 3, [ALL] * 4, BLOCKS * BLOCK_TOKENS),
    Case(
        "the same, the last of a state each 4,096 tokens missing",
        [FULL] + [STATE] * 3,
        [ALL] + [ALL[ALL % 256 == 255][:-1]] * 3,
        (BLOCKS - 256) * BLOCK_TOKENS,
    ),
    Case(
        "5 windows that have every other block", [FULL] + [WINDOW] * 5, [ALL] + [ALL[::2]] * 5, BLOCK_TOKENS
    ),
    Case(
        "5 windows that lack a seventh each",
        [FULL] + [WINDOW] * 5,
        [ALL] + [ALL[g != (ALL + 1) % 7] for g in range(1, 6)],
        0,
    ),
    Case("3 states that never agree", [FULL] + [STATE] * 3, [ALL] + [ALL[g == ALL % 3] for g in range(3)], 0),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--rounds", type=at_least_one, default=200)
    arguments = parser.parse_args()
    rounds = arguments.rounds
    worlds = [case.world() for case in CASES]
    times: list[list[float]] = [[] for _ in CASES]
    for _ in range(rounds):
        for case, (_, lookup, keys), taken in zip(CASES, worlds, times, strict=True):
            begun = time.perf_counter()
            found = lookup.look(keys, 0, ROOM, 1, 0)
            taken.append(time.perf_counter() - begun)
            restored = found.lengths[0] if found.lengths else 0
            if restored != case.tokens:
                raise SystemExit(f"{case.name}: {restored} tokens restored, not {case.tokens}")
            lookup.release(found)
    plain = statistics.median(times[0])
    print(f"{'':<58}{'median us':>10}{'least':>8}{'of one':>8}")
    rows = []
    for case, taken in zip(CASES, times, strict=True):
        median = statistics.median(taken)
        rows.append({"name": case.name, "median_us": median * 1e6, "least_us": min(taken) * 1e6})
        print(f"{case.name:<58}{median * 1e6:>10.1f}{min(taken) * 1e6:>8.1f}{median / plain:>8.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
