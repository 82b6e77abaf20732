"""A running engine with the spying linker, and access to the notes that the linker writes."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from demo.sglang_process import SglangProcess, linker
from tests.engines_sglang.asked import Asked, whole
from tests.engines_sglang.conftest import Judge

HOST_BYTES = 48 << 20
"""Bytes of host memory for 700 pages of the tiny model. This is enough for all prompts of these tests."""
DISK_BYTES = 64 << 20
SETTLED_DEADLINE_S = 60.0


class Spied(Asked):
    """An engine with the spying linker. The constructor starts the engine.

    Args:
        folder: folder for the log, the notes and the orders; must not exist yet.
        disk: folder of the disk tier; None for no disk tier.
        arguments: more engine arguments.
        settings: flexkv's settings by dotted name, with `__` for each dot.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        disk: Path | None = None,
        arguments: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        self.folder = folder
        folder.mkdir()
        ours: dict[str, Any] = {"host__bytes": HOST_BYTES}
        if disk is not None:
            # With this limit, lookups wait long enough for pages from disk to be hits even on a busy machine.
            ours |= {
                "disk__folders": str(disk),
                "disk__bytes_per_folder": DISK_BYTES,
                "load__lookup_wait_s": 30.0,
            }
        told = linker("tests.engines_sglang.spying_linker", "SpyingLinker", **ours | settings)
        self.engine = SglangProcess(
            model,
            folder / "engine.log",
            {**told, **(arguments or {})},
            **{"SPY_FOLDER": str(folder), **(environment or {})},
        )

    def served(self, answer: dict[str, Any]) -> int:
        return int(answer["host"])

    def forget(self) -> None:
        """Waits for stores in flight, empties the engine's own cache, and overwrites its pool."""
        self.settle()
        assert self.engine.call("flush")

    def settle(self) -> None:
        """Waits until every offload is complete."""
        ends_s = time.monotonic() + SETTLED_DEADLINE_S
        while len(self.notes("stored")) < len(self.notes("offload")):
            assert time.monotonic() < ends_s, "an offload has not completed"
            time.sleep(0.05)

    def order(self, what: str, content: str = "") -> None:
        """Writes an order for the linker. The linker deletes the file when it executes the order."""
        (self.folder / what).write_text(content)

    def notes(self, what: str, rank: int = 0) -> list[dict[str, Any]]:
        lines = (self.folder / f"notes-{rank}").read_text().splitlines()
        return [note for note in map(json.loads, lines) if note["what"] == what]

    def pages_of_last(self, what: str) -> set[int]:
        return set(self.notes(what)[-1]["pages"])

    def stored_pages(self) -> set[int]:
        """Returns the numbers of those pages of the pool that the engine has offloaded so far."""
        return {page for note in self.notes("offload") for page in note["pages"]}

    def loads_to_other_pages(self, judge: Judge, name: str = "a") -> None:
        """Checks that a stored prompt is loaded after a flush, into other pages of the pool than it had before."""
        judge(name, self.ask_one(name))
        stored = self.stored_pages()
        self.forget()
        # Prompt "b" takes the first pages of the empty pool, so the stored pages of the prompt `name` are loaded into
        # other pages.
        judge("b", self.ask_one("b"))
        answer = self.ask_one(name)
        judge(name, answer)
        assert answer["host"] == whole(name)
        assert not self.pages_of_last("load") & stored


def wait_until_durable(disk: Path) -> None:
    """Waits until no file in the folder has changed for three seconds. This suffices, because the journal commits
    within one second."""
    ends_s = time.monotonic() + SETTLED_DEADLINE_S
    before, since_s = "", time.monotonic()
    while time.monotonic() - since_s < 3:
        assert time.monotonic() < ends_s, "the disk tier never came to rest"
        time.sleep(0.5)
        now = str(sorted((str(file), file.stat().st_mtime_ns) for file in disk.rglob("*") if file.is_file()))
        if now != before:
            before, since_s = now, time.monotonic()
