"""Computes which share of a request trace's tokens are hits for a model with sliding windows, for several cache sizes.

One KV group with full attention and five with windows share the slots of a native index. A hit can end only where all
groups have the pages that it needs. The pages of windows are stored at the end of each prompt, every `--checkpoint`
tokens before its end, and where a prompt diverges from earlier ones. Two eviction policies for these pages are
compared. With `lru`, all pages are evicted in the order of their last use. With `spare`, pages of checkpoints are
stored as spare blocks (docs/architecture.md), and may be evicted before other pages. A cache of N tokens has slots for
all six groups' pages of N tokens. The size `all` has slots for the pages of the complete trace.

    python -m benchmarks.window_eviction TRACE [--tokens 1000000 3000000]

Each line of a trace is a JSON object for one request: `hash_ids` identify its blocks of 512 tokens in order, and
`input_length` is its number of tokens (as in Mooncake's traces).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from flexkv import c_ext
from flexkv.cache.base import NO_ENTRY
from flexkv.facts.keys import Keys

BLOCK_TOKENS = 512
FULL, WINDOWS = 0, range(1, 6)
GROUPS = 1 + len(WINDOWS)
TOKENS = (1_000_000, 3_000_000, 5_100_000)


@dataclass(frozen=True)
class Request:
    """One request of a trace.

    Attributes:
        keys: keys of the prompt's complete blocks, in order. The prompt's last token is left out, because it is always
            computed.
        tokens: number of tokens of the complete prompt.
    """

    keys: Keys
    tokens: int


def read_trace(path: Path) -> list[Request]:
    requests = []
    for line in path.read_text().splitlines():
        request = json.loads(line)
        blocks = (request["input_length"] - 1) // BLOCK_TOKENS
        ids = np.array(request["hash_ids"][:blocks], np.uint64)
        keys = np.zeros((len(ids), 16), np.uint8)
        # Spreads the ids over the keys' bits, because the index assumes that keys are random like digests.
        keys.view(np.uint64)[:] = ids[:, None] * np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64)
        requests.append(Request(keys, request["input_length"]))
    return requests


class Cache:
    """A cache for one KV group with full attention and five with windows, on a native index.

    Args:
        slots: number of slots; each holds a page of any group.
        reach: length of a window in blocks.
        checkpoint: number of blocks between two checkpoints of a prompt.
        spare: whether pages of checkpoints are stored as spare blocks.
    """

    def __init__(self, slots: int, reach: int, checkpoint: int, spare: bool) -> None:
        self._index = c_ext.BlockIndex([slots] * GROUPS, "lru", [FULL] * GROUPS)
        self._index.grow(FULL, slots)
        self._reach, self._checkpoint, self._spare = reach, checkpoint, spare

    def serve(self, keys: Keys) -> int:
        """Serves a request, and stores the pages that were not cached. Returns how many blocks were hits."""
        there = self._index.find(FULL, keys) != NO_ENTRY
        shared = len(there) if there.all() else int(there.argmin())
        hit = self._longest(keys, shared)
        of_hit = self._window(hit)
        for group in WINDOWS:
            self._use(group, keys[of_hit], hit=True)
        self._store(FULL, keys, spare=False)
        for end in range(self._checkpoint, len(keys), self._checkpoint):
            if end > hit:
                self._store_windows(keys, end, spare=self._spare and self._is_apart(end, len(keys)))
        if hit < shared < len(keys):
            self._store_windows(keys, shared, spare=False)
        if len(keys) > hit:
            self._store_windows(keys, len(keys), spare=False)
        self._use(FULL, keys[:hit], hit=True)
        self._use(FULL, keys, hit=False)
        return hit

    def _window(self, end: int) -> slice:
        return slice(max(0, end - self._reach), end)

    def _is_apart(self, end: int, of_prompt: int) -> bool:
        return end <= max(0, of_prompt - self._reach)

    def _longest(self, keys: Keys, most: int) -> int:
        present: NDArray[np.bool_] = np.ones(most, np.bool_)
        for group in WINDOWS:
            present &= self._index.find(group, keys[:most]) != NO_ENTRY
        for end in range(most, 0, -1):
            if present[self._window(end)].all():
                return end
        return 0

    def _store_windows(self, keys: Keys, end: int, spare: bool) -> None:
        for group in WINDOWS:
            self._store(group, keys[self._window(end)], spare)

    def _store(self, group: int, keys: Keys, spare: bool) -> None:
        entries = self._index.insert(group, keys, len(keys), spare=spare)[1]
        self._index.finish(entries, np.ones(len(entries), np.uint8))

    def _use(self, group: int, keys: Keys, hit: bool) -> None:
        entries = self._index.find(group, keys)
        self._index.touch(entries, len(entries) if hit else 0)


def hit_ratio(requests: list[Request], slots: int, window: int, checkpoint: int, spare: bool) -> float:
    """Runs the trace, and returns the share of all tokens that were hits."""
    cache = Cache(slots, -(-window // BLOCK_TOKENS), max(1, checkpoint // BLOCK_TOKENS), spare)
    hits = sum(cache.serve(request.keys) for request in requests)
    return hits * BLOCK_TOKENS / sum(request.tokens for request in requests)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, help="a file of requests, one JSON object a line")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="sizes of the cache")
    parser.add_argument("--window", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--checkpoint", type=int, default=8192, help="tokens between boundaries")
    asked = parser.parse_args()
    if not asked.trace.is_file():
        parser.error(f"no trace at {asked.trace}: nothing to measure")
    requests = read_trace(asked.trace)
    table = Table("tokens", "lru", "spare", "spare : lru", box=None)
    everything = GROUPS * sum(len(request.keys) for request in requests)
    for tokens in (*asked.tokens, None):
        slots = everything if tokens is None else GROUPS * tokens // BLOCK_TOKENS
        lru, spare = (
            hit_ratio(requests, slots, asked.window, asked.checkpoint, spare) for spare in (False, True)
        )
        table.add_row(
            "all" if tokens is None else str(tokens), *(f"{r:.3f}" for r in (lru, spare, spare / lru))
        )
    Console().print(table)


if __name__ == "__main__":
    main()
