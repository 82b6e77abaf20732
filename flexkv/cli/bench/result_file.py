"""The JSON file of `flexkv bench transfer`. It is rewritten after every group of rows, so that an interrupted run keeps
its measurements.

A device or a pipe, such as /dev/stdout, is not replaced. Instead, all results so far are written to it as one line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flexkv.cli.bench.base import ComparisonRow
from flexkv.cli.bench.beside_rows import BesideRow
from flexkv.cli.bench.latency_rows import LatencyRow, ProcessorRow
from flexkv.cli.bench.transfer_bench import TransferRow


class ResultFile:
    """All results so far, in memory and in a file.

    Args:
        path: the file to write, or a link to it; None keeps the results only in memory.
        facts: what is known before the first measurement, such as the device and the options.
    """

    def __init__(self, path: Path | None, facts: dict[str, Any]) -> None:
        self._path = path
        self.rows: list[TransferRow] = []
        self.compared: list[ComparisonRow] = []
        self.beside: list[BesideRow] = []
        self.latency: list[LatencyRow] = []
        self.processor: list[ProcessorRow] = []
        self._content: dict[str, Any] = {**facts, "parts": []}
        self._write()

    def add_rows(self, rows: Iterable[TransferRow]) -> None:
        self.rows += rows
        self._write()

    def compare(self, rows: Iterable[ComparisonRow]) -> None:
        self.compared += rows
        self._write()

    def add_beside(self, rows: Iterable[BesideRow]) -> None:
        self.beside += rows
        self._write()

    def add_latency(self, rows: Iterable[LatencyRow], processor: Iterable[ProcessorRow]) -> None:
        self.latency += rows
        self.processor += processor
        self._write()

    def part_ended(self, part: str) -> None:
        """Records that all rows of `part` are complete."""
        self._content["parts"].append(part)
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        kinds: dict[str, Iterable[Any]] = {
            "rows": self.rows,
            "comparisons": self.compared,
            "beside": self.beside,
            "latency": self.latency,
            "processor": self.processor,
        }
        self._content |= {name: [asdict(row) for row in rows] for name, rows in kinds.items()}
        # Opens the path as it was given, because a link under /proc to a pipe has a target that is not a path.
        if self._path.exists() and not self._path.is_file():
            with self._path.open("w") as stream:
                stream.write(json.dumps(self._content) + "\n")
            return
        # Replaces the previous file atomically: a reader always sees a complete file, even after a loss of power.
        path = self._path.resolve()
        beside = path.with_name(f".{path.name}.part")
        with beside.open("w") as file:
            json.dump(self._content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
