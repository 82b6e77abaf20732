"""Converts the counts of a remote tier to series of metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from flexkv.cache.tiers.contract import Series, TierCounts
from flexkv.observe import PageLoss
from flexkv.remote.plane import LOST, RemoteTotals

OK = "ok"
MISSED = {
    "absent": PageLoss.REMOTE_ABSENT,
    "other_size": PageLoss.REMOTE_SIZE,
    "expired": PageLoss.REMOTE_EXPIRED,
    "failed": PageLoss.REMOTE_LATE,
    "away": PageLoss.REMOTE_LATE,
    LOST: PageLoss.REMOTE_LATE,
}
"""Maps the outcome of a `get` to the reason why the page was not read. Any outcome that is neither listed nor OK is a
failed check of the content."""

DROPPED = {"full": PageLoss.REMOTE_FULL, "known": PageLoss.REMOTE_KNOWN}
"""Maps the outcome of a `put` to the reason why the page was not written. Any outcome that is neither listed nor OK is
a failure."""


def remote_series(counts: TierCounts, totals: RemoteTotals) -> Mapping[Series, int]:
    """Returns the running totals by series, except those that are 0."""
    found: Counter[Series] = Counter()

    def add(name: str, value: int, label: str = "", of: str = "") -> None:
        if value:
            found[name, ((label, of),) if label else ()] += value

    def lost(loss: PageLoss, pages: int) -> None:
        add(loss.metric, pages, "reason", loss.reason)

    add("flexkv_remote_pages_total", totals.gets[OK], "direction", "read")
    add("flexkv_remote_pages_total", totals.puts[OK], "direction", "write")
    add("flexkv_remote_bytes_total", totals.bytes_got, "direction", "read")
    add("flexkv_remote_bytes_total", totals.bytes_put, "direction", "write")
    for outcome, pages in totals.gets.items():
        if outcome != OK:
            lost(MISSED.get(outcome, PageLoss.REMOTE_CONTENT), pages)
    for outcome, pages in totals.puts.items():
        if outcome != OK:
            lost(DROPPED.get(outcome, PageLoss.REMOTE_FAILED), pages)
    lost(PageLoss.REMOTE_BUSY, counts.dropped_writes + counts.down_writes)
    for outcome, lookups in totals.lookups.items():
        add("flexkv_remote_lookups_total", lookups, "outcome", outcome)
    add("flexkv_remote_lookups_total", counts.waits, "outcome", "waited")
    add("flexkv_remote_lookups_total", counts.late, "outcome", "late")
    add("flexkv_remote_lookups_total", counts.left, "outcome", "computed")
    add("flexkv_remote_lookups_total", counts.no_room, "outcome", "no_room")
    add("flexkv_remote_restarts_total", totals.restarts)
    return found
