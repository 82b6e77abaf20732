"""A plugin that warms the cache: it reads the pages of the prompts in a file from disk to host memory once, and then
ends.

Copy the plugin into the folder of `plugins.folder`, with `prompts.jsonl` beside it. `prompts.jsonl` has one list of
token ids per line, the most important prompt first. The plugin ends at the end of the file, or when host memory is
nearly full.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

from flexkv.errors import PluginCallError
from flexkv.plugins.client import CachedPages, UnitClient, connect

PROMPTS = Path("prompts.jsonl")
FULL_SHARE = 0.9
"""The plugin stops when this share of host memory is in use, because more pages would only evict others."""

RETRY_S = 5.0
TRIES = 720
"""Maximum number of attempts of a call, which together take an hour. An engine carries out calls only in its steps, and
runs no steps without requests. If it has had no request for an hour, it needs no warm cache.
"""


def prompts() -> Iterator[list[int]]:
    with PROMPTS.open() as lines:
        yield from (json.loads(line) for line in lines if line.strip())


def has_room(unit: UnitClient) -> bool:
    status = unit.status()
    # Before the engine's first step the unit reports 0 slots, and no memory is in use yet.
    return not status["host_slots"] or bool(status["host_slots_used"] < FULL_SHARE * status["host_slots"])


def prefetch(unit: UnitClient, tokens: list[int]) -> CachedPages:
    """Reads the pages of a prompt to host memory, in several calls if one call has no free slots for all of them."""
    before = -1
    for _ in range(TRIES):
        try:
            pages = unit.prefetch(tokens)[0]
        except PluginCallError as error:
            if "in time" not in str(error):
                raise
            time.sleep(RETRY_S)
            continue
        if pages.in_host >= pages.leading or pages.in_host == before:
            return pages
        before = pages.in_host
    raise TimeoutError("the engine takes no step")


def main() -> None:
    warmed = read = 0
    with connect() as unit:
        for tokens in prompts():
            if not has_room(unit):
                break
            pages = prefetch(unit, tokens)
            warmed += pages.in_host > 0
            read += pages.in_host
    print(f"warmed {warmed} prompts: {read} pages of them are in host memory", flush=True)


if __name__ == "__main__":
    main()
