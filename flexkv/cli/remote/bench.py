"""Measures a store from this machine, with values under separate names, which are removed at the end."""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from flexkv.remote.base import Outcome, Presence, Store, StoreOptions
from flexkv.remote.stores import open_store

PREFIX = "flexkv-bench/"
"""No engine's values have such a name."""
TTL_S = 600
"""A store that can expire values drops what a killed bench has left after this time."""
NAMES = 256
"""Names per question, as an engine asks."""
SINGLE_VALUES = 16
"""Values moved one per call, at most."""
LEAST_S = 1.0
"""Seconds that the last call has at least."""
CALL_S = 30.0
"""Seconds that one call has at most."""
PHASES = 6
"""Puts, questions and gets, each one per call and many per call: all have the same share of the time."""
REMOVE_S = 10.0


@dataclass(slots=True)
class BenchRow:
    """Calls of one kind.

    Attributes:
        per_call: values or names per call.
        good: values that were moved, or names that were answered.
        unit: unit of the rate.
        rate: 0.0 where nothing was moved or answered.
        call_ms: median time of a call.
        ratio: the rate over that of one value or name per call; None for that row itself, and where it has no rate.
    """

    what: str
    per_call: int
    calls: int
    good: int
    failed: int
    unit: str
    rate: float
    call_ms: float
    ratio: float | None = None


@dataclass(slots=True)
class BenchResult:
    """The measured rows of one store, and what went wrong.

    Attributes:
        reason: why the first failing call failed; empty if none did.
        wrong: values that came back with different bytes.
        left: names that could not be removed.
        removed: values that the store had accepted and no longer has.
    """

    value_bytes: int
    rows: list[BenchRow] = field(default_factory=list)
    reason: str = ""
    wrong: int = 0
    removed: int = 0
    left: list[str] = field(default_factory=list)


def bench(options: StoreOptions, value_bytes: int, values: int, batch: int, most_s: float) -> BenchResult:
    """Puts `values` values in batches and a few one by one, asks for their names, and gets them back.

    Args:
        most_s: after this many seconds no call begins, except those that remove values.

    Raises:
        StoreError: these settings allow no client.
    """
    store = open_store(replace(options, ttl_s=TTL_S))
    measured = _Bench(store, value_bytes, batch, most_s)
    try:
        measured.run(values)
    finally:
        measured.remove()
        store.close()
    return measured.result


class _Bench:
    """The measurement, with memory for one call: uint8 [batch, value_bytes] to send, and as much to receive."""

    def __init__(self, store: Store, value_bytes: int, batch: int, most_s: float) -> None:
        self._store = store
        self._sent = np.random.default_rng(0).integers(0, 256, (batch, value_bytes), dtype=np.uint8)
        self._came = np.ones_like(self._sent)  # written, so that the first get causes no page faults
        self._share_s = most_s / PHASES
        self._ends_s = time.perf_counter() + most_s
        self._names: list[str] = []
        self._stored: set[str] = set()
        self._prefix = f"{PREFIX}{secrets.token_hex(8)}/"
        self.result = BenchResult(value_bytes)
        for memory in (self._sent, self._came):
            self.result.reason = self.result.reason or store.register(memory.reshape(-1))

    def run(self, values: int) -> None:
        batch = len(self._sent)
        # Connects, which is not part of the measurement.
        if why := self._store.alive(self._call_s()):
            self.result.reason = f"the store is not there: {why}"
            return
        names = [f"{self._prefix}{number:08d}" for number in range(values)]
        single = [f"{self._prefix}one/{number:08d}" for number in range(min(values, SINGLE_VALUES))]
        absent = [f"{self._prefix}absent/{number:08d}" for number in range(NAMES)]
        rows = self.result.rows
        rows += self._pair("put", "GB/s", self._put, (single, 1), (names, batch))
        asked = (names * NAMES)[: NAMES // 2] + absent[: NAMES // 2]
        rows += self._pair("exists", "names/s", self._exists, (asked, 1), (asked * 8, NAMES))
        rows += self._pair("get", "GB/s", self._get, (single, 1), (names, batch))

    def _call_s(self) -> float:
        return max(LEAST_S, min(CALL_S, self._ends_s - time.perf_counter()))

    def _pair(
        self,
        what: str,
        unit: str,
        call: Callable[[Sequence[str]], int],
        alone: tuple[list[str], int],
        together: tuple[list[str], int],
    ) -> list[BenchRow]:
        first, second = (self._measure(what, unit, call, *how) for how in (alone, together))
        if second.per_call == 1:
            return [second]
        second.ratio = second.rate / first.rate if first.rate else None
        return [first, second]

    def _measure(
        self, what: str, unit: str, call: Callable[[Sequence[str]], int], names: list[str], per_call: int
    ) -> BenchRow:
        """Calls until all names are done or the time is up."""
        times, good, asked = [], 0, 0
        ends_s = min(self._ends_s, time.perf_counter() + self._share_s)
        for first in range(0, len(names), per_call):
            began_s = time.perf_counter()
            if began_s >= ends_s:
                break
            part = names[first : first + per_call]
            good += call(part)
            asked += len(part)
            times.append(time.perf_counter() - began_s)
        total_s = sum(times)
        amount = good * (self.result.value_bytes / 1e9 if unit == "GB/s" else 1)
        rate = amount / total_s if total_s else 0.0
        call_ms = statistics.median(times) * 1e3 if times else 0.0
        return BenchRow(what, per_call, len(times), good, asked - good, unit, rate, call_ms)

    def _marked(self, names: Sequence[str]) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
        """The bytes to send under these names: each value has its own first bytes."""
        for row, name in enumerate(names):
            self._sent[row, :8] = np.frombuffer(name[-8:].encode(), np.uint8)
        return self._sent[: len(names)]

    def _put(self, names: Sequence[str]) -> int:
        self._names += names
        outcomes = self._store.put(names, [[value] for value in self._marked(names)], self._call_s())
        self._stored |= {name for name, outcome in zip(names, outcomes, strict=True) if outcome is Outcome.OK}
        return self._good([outcome is Outcome.OK for outcome in outcomes])

    def _get(self, names: Sequence[str]) -> int:
        outcomes = self._store.get(names, [[value] for value in self._came[: len(names)]], self._call_s())
        right = [outcome is Outcome.OK for outcome in outcomes]
        good = self._good(right)
        came, sent = self._came[: len(names)][right], self._marked(names)[right]
        self.result.wrong += int(np.count_nonzero((came != sent).any(axis=1)))
        return good

    def _exists(self, names: Sequence[str]) -> int:
        answers = self._store.exists(names, self._call_s())
        return self._good([answer is not Presence.UNKNOWN for answer in answers])

    def _good(self, right: Sequence[bool]) -> int:
        if not all(right):
            self.result.reason = self.result.reason or self._store.last_error or "the store did not say why"
        return sum(right)

    def remove(self) -> None:
        """Removes every value that may have been put."""
        for first in range(0, len(self._names), NAMES):
            part = self._names[first : first + NAMES]
            gone = self._store.remove(part, REMOVE_S)
            self.result.removed += sum(
                is_gone and name in self._stored for name, is_gone in zip(part, gone, strict=True)
            )
            self.result.left += [name for name, is_gone in zip(part, gone, strict=True) if not is_gone]
