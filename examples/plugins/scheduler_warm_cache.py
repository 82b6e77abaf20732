"""A plugin that warms the cache: reads pages of the prompts in a file from disk to host memory, once, and ends.

Copy it into the folder of `plugins.folder`, with `prompts.jsonl` beside it: one list of token ids per line, the most
important prompt first. It goes on until the file or the room in host memory ends.
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
"""With so much of host memory in use, more pages would only evict others."""

RETRY_S = 5.0
TRIES = 720
"""An engine carries out calls in its steps. One without requests for an hour needs no warm cache."""


def prompts() -> Iterator[list[int]]:
    with PROMPTS.open() as lines:
        yield from (json.loads(line) for line in lines if line.strip())


def has_room(unit: UnitClient) -> bool:
    status = unit.status()
    # Before the engine's first step no memory is in use yet.
    return not status["host_slots"] or bool(status["host_slots_used"] < FULL_SHARE * status["host_slots"])


def prefetch(unit: UnitClient, tokens: list[int]) -> CachedPages:
    """Reads the pages of a prompt, in several calls where one finds no room for all."""
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
