"""What a remote tier has counted, as series of metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from flexkv.cache.tier import Series, TierCounts
from flexkv.remote.plane import LOST, RemoteTotals

OK = "ok"
MISSED = {
    "absent": "absent",
    "other_size": "size",
    "expired": "expired",
    "failed": "failed",
    "away": "failed",
    LOST: "failed",
}
"""Outcome of a get -> reason; every other one is a check that failed."""

DROPPED = frozenset({"full", "known"})
"""Outcomes of a put that are reasons by their own names; every other one is a failure."""


def remote_series(counts: TierCounts, totals: RemoteTotals) -> Mapping[Series, int]:
    """Running totals; only what was counted."""
    found: Counter[Series] = Counter()

    def add(name: str, value: int, label: str = "", of: str = "") -> None:
        if value:
            found[name, ((label, of),) if label else ()] += value

    add("flexkv_remote_pages_total", totals.gets[OK], "direction", "read")
    add("flexkv_remote_pages_total", totals.puts[OK], "direction", "write")
    add("flexkv_remote_bytes_total", totals.bytes_got, "direction", "read")
    add("flexkv_remote_bytes_total", totals.bytes_put, "direction", "write")
    for outcome, pages in totals.gets.items():
        if outcome != OK:
            add("flexkv_remote_missed_pages_total", pages, "reason", MISSED.get(outcome, "content"))
    for outcome, pages in totals.puts.items():
        if outcome != OK:
            add(
                "flexkv_remote_dropped_pages_total",
                pages,
                "reason",
                outcome if outcome in DROPPED else "failed",
            )
    add("flexkv_remote_dropped_pages_total", counts.dropped_writes, "reason", "busy")
    for outcome, lookups in totals.lookups.items():
        add("flexkv_remote_lookups_total", lookups, "outcome", outcome)
    add("flexkv_remote_lookups_total", counts.waits, "outcome", "waited")
    add("flexkv_remote_lookups_total", counts.late, "outcome", "late")
    add("flexkv_remote_lookups_total", counts.left, "outcome", "computed")
    add("flexkv_remote_lookups_total", counts.no_room, "outcome", "no_room")
    add("flexkv_remote_restarts_total", totals.restarts)
    return found
