"""What a remote tier has counted, as series of metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from flexkv.cache.tier import Series, TierCounts
from flexkv.remote.plane import RemoteTotals

OK = "ok"
MISSED = {"absent": "absent", "other_size": "size", "expired": "expired", "failed": "failed"}
"""Outcome of a get -> reason; every other one is a check that failed."""

DROPPED = frozenset({"full", "known"})
"""Outcomes of a put that are reasons by their own names; every other one is a failure."""


def remote_series(counts: TierCounts, totals: RemoteTotals) -> Mapping[Series, int]:
    """Running totals; only what was counted."""
    found: Counter[Series] = Counter()

    def add(name: str, value: int, label: str = "", of: str = "") -> None:
        if value:
            found[f"flexkv_remote_{name}_total", ((label, of),) if label else ()] += value

    add("pages", totals.gets[OK], "direction", "read")
    add("pages", totals.puts[OK], "direction", "write")
    add("bytes", totals.bytes_got, "direction", "read")
    add("bytes", totals.bytes_put, "direction", "write")
    for outcome, pages in totals.gets.items():
        if outcome != OK:
            add("missed_pages", pages, "reason", MISSED.get(outcome, "content"))
    for outcome, pages in totals.puts.items():
        if outcome != OK:
            add("dropped_pages", pages, "reason", outcome if outcome in DROPPED else "failed")
    add("dropped_pages", counts.dropped_writes, "reason", "busy")
    for outcome, lookups in totals.lookups.items():
        add("lookups", lookups, "outcome", outcome)
    add("lookups", counts.waits, "outcome", "waited")
    add("lookups", counts.late, "outcome", "late")
    add("lookups", counts.left, "outcome", "computed")
    add("restarts", totals.restarts)
    return found
