"""Measures a store from this machine. The values that it puts have separate names, and are removed at the end."""

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
"""Prefix of the names of the measurement's values. Names of engines' values begin differently."""
TTL_S = 600
"""Time to live of the measurement's values, in seconds. If the measurement is killed, a store that can expire values
removes the remaining values after this time.
"""
NAMES = 256
"""Number of names per `exists` call, which is as many as a unit asks for at once."""
SINGLE_VALUES = 16
"""The maximum number of values that are moved one per call."""
LEAST_S = 1.0
"""The shortest deadline of a call, in seconds. A call gets this deadline even if less of the total time is left."""
CALL_S = 30.0
"""The longest deadline of a call, in seconds."""
PHASES = 6
"""Number of phases: puts, `exists` calls and gets, each first with one value per call and then with many. Each phase
may take the same share of the total time."""
REMOVE_S = 10.0


@dataclass(slots=True)
class BenchRow:
    """The measured calls of one kind.

    Attributes:
        what: "put", "exists" or "get".
        per_call: values or names per call.
        good: number of values that were moved, or of names for which the store answered.
        unit: unit of `rate`: "GB/s" or "names/s".
        rate: how much was moved or answered per second of the calls, in `unit`; 0.0 if nothing was.
        call_ms: median time of a call in milliseconds.
        ratio: this rate divided by the rate with one value or name per call. None in the row with one value or name per
            call, and if that row's rate is 0.
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
        reason: why the first of the failed calls failed; empty if no call failed.
        wrong: number of values that came back with different bytes.
        left: names that could not be removed.
        removed: number of values that the store accepted and, after their removal, no longer has.
    """

    value_bytes: int
    rows: list[BenchRow] = field(default_factory=list)
    reason: str = ""
    wrong: int = 0
    removed: int = 0
    left: list[str] = field(default_factory=list)


def bench(options: StoreOptions, value_bytes: int, values: int, batch: int, most_s: float) -> BenchResult:
    """Puts `values` values in batches and a few one by one, asks whether they exist, and gets them back.

    Args:
        most_s: after this many seconds no call begins, except those that remove values.

    Raises:
        StoreError: no client can be made with these options.
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
    """A measurement. Its memory is for one call: uint8 [batch, value_bytes] to send, and the same to receive."""

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
        # Connects before the first measured call.
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
        """Measures calls with `per_call` names each, until all names are done or this phase's time is over."""
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
        """Returns the bytes to send under these names. A value begins with the last 8 characters of its name."""
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
