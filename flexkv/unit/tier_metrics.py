"""Reports the counts of a unit's tiers as metrics."""

from __future__ import annotations

from dataclasses import fields

from flexkv.cache.base import TierId
from flexkv.cache.ledger.stats import ManagerStats
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.tiers.contract import Series, TierCounts
from flexkv.observe import Counters, PageLoss

ON_DISK = frozenset({"disk", "peers"})
"""Labels of the tiers whose pages lie in folders: those of this unit and those of peers. The metrics `flexkv_disk_*`
are sums over these tiers.
"""


STATS = {
    "hit_blocks": ("flexkv_manager_blocks_total", "promised"),
    "miss_blocks": ("flexkv_manager_blocks_total", "not_promised"),
    "forgotten_blocks": ("flexkv_manager_blocks_total", "forgotten"),
    "loaded_pages": ("flexkv_manager_pages_total", "loaded"),
    "failed_load_pages": ("flexkv_manager_pages_total", "load_failed"),
    "stored_pages": ("flexkv_manager_pages_total", "stored"),
    "failed_store_pages": ("flexkv_manager_pages_total", "store_failed"),
    "discarded_pages": ("flexkv_manager_pages_total", "discarded"),
    "busy_pages": ("flexkv_manager_pages_total", "busy"),
    "lookups": ("flexkv_manager_events_total", "lookup"),
    "tail_hits": ("flexkv_manager_events_total", "tail_hit"),
    "cut_promises": ("flexkv_manager_events_total", "cut_promise"),
}
"""The fields of `ManagerStats` that are counted in a metric with the label `event`: for each field, the metric and the
label's value. The other fields have metrics of their own.
"""


class TierMetrics:
    """Reports the counts of one manager and its tiers as metrics. Each report adds what was counted since the previous
    report.
    """

    def __init__(self, manager: LocalCacheManager) -> None:
        self._manager = manager
        self._labels = [tier.facts.label for tier in manager.tiers]
        self._disks = {
            TierId(number): tier
            for number, tier in enumerate(manager.tiers)
            if self._labels[number] in ON_DISK
        }
        self._counted = TierCounts()
        self._counted_stats = ManagerStats()
        self._counted_streamed = 0
        self._counted_durable = 0
        self._counted_evictions = 0
        self._counted_totals: list[dict[Series, int]] = [{} for _ in manager.tiers]
        self._counted_hits = [0 for _ in manager.tiers]
        self._counted_no_room = [0 for _ in manager.tiers]
        self._counted_down = self._down

    @property
    def has_news(self) -> bool:
        """Whether pages became durable, or a tier went down or came back, since the last `count`."""
        return self._durable != self._counted_durable or self._down != self._counted_down

    @property
    def _down(self) -> list[bool]:
        return [bool(tier.down) for tier in self._manager.tiers]

    @property
    def _durable(self) -> int:
        return sum(tier.durable_pages for tier in self._disks.values())

    def count(self, counters: Counters) -> None:
        """Adds to `counters` what was counted since the last call. Also sets the gauges in `counters`."""
        self._counted_down = self._down
        evictions = self._manager.counts.evicted_blocks
        if evictions != self._counted_evictions:
            counters.add("flexkv_evictions_total", evictions - self._counted_evictions)
            self._counted_evictions = evictions
        self._count_manager(counters)
        for number, (tier, label) in enumerate(zip(self._manager.tiers, self._labels, strict=True)):
            hits = tier.counts.hits
            if hits != self._counted_hits[number]:
                counters.add("flexkv_hit_blocks_total", hits - self._counted_hits[number], tier=label)
                self._counted_hits[number] = hits
            no_room = tier.counts.no_room_pages
            if no_room != self._counted_no_room[number]:
                PageLoss.NO_ROOM.count(counters, no_room - self._counted_no_room[number], tier=label)
                self._counted_no_room[number] = no_room
        for tier, counted in zip(self._manager.tiers, self._counted_totals, strict=True):
            for name, value in tier.gauges().items():
                counters.set(name, value)
            for series, total in tier.totals().items():
                if new := total - counted.get(series, 0):
                    counters.add(series[0], new, **dict(series[1]))
                    counted[series] = total
        if self._disks:
            self._count_pages(counters)
            self._count_costs(counters)

    def _count_manager(self, counters: Counters) -> None:
        """Adds the manager's own counts: the fields in `STATS`, the reasons for misses, and expired blocks."""
        now, before = self._manager.stats(), self._counted_stats
        for name, (metric, event) in STATS.items():
            if new := getattr(now, name) - getattr(before, name):
                counters.add(metric, new, event=event)
        for reason, blocks in now.missed.items():
            if new := blocks - before.missed.get(reason, 0):
                counters.add("flexkv_missed_blocks_total", new, reason=reason.reason)
        PageLoss.EXPIRED.count(counters, now.expired_blocks - before.expired_blocks)
        self._counted_stats = now

    def _count_pages(self, counters: Counters) -> None:
        now = TierCounts(
            **{
                field.name: sum(getattr(t.counts, field.name) for t in self._disks.values())
                for field in fields(TierCounts)
            }
        )
        new = {
            field.name: getattr(now, field.name) - getattr(self._counted, field.name) for field in fields(now)
        }
        self._counted = now
        counters.add("flexkv_disk_pages_total", new["read"], direction="read")
        counters.add("flexkv_disk_pages_total", new["written"], direction="write")
        counters.add("flexkv_disk_failed_pages_total", new["failed_reads"], direction="read")
        counters.add("flexkv_disk_failed_pages_total", new["failed_writes"], direction="write")
        PageLoss.DISK_BUSY.count(counters, new["dropped_writes"])
        PageLoss.DISK_EVICTED.count(counters, new["lost"])
        PageLoss.DISK_GONE.count(counters, new["gone"] + new["down_writes"])
        counters.add("flexkv_disk_evictions_total", new["evicted"])
        PageLoss.DISK_EXPIRED.count(counters, new["expired"])
        counters.add("flexkv_disk_lookups_total", new["waits"], outcome="waited")
        counters.add("flexkv_disk_lookups_total", new["late"], outcome="late")
        counters.add("flexkv_disk_lookups_total", new["left"], outcome="computed")
        counters.add("flexkv_disk_lookups_total", new["no_room"], outcome="no_room")
        PageLoss.DISK_LEFT.count(counters, new["left_pages"])
        counters.add("flexkv_disk_prefetched_pages_total", new["prefetched"])
        counters.add("flexkv_disk_gds_pages_total", new["gds_read"], direction="read")
        counters.add("flexkv_disk_gds_pages_total", new["gds_written"], direction="write")
        streamed = self._manager.counts.streamed_pages
        counters.add("flexkv_disk_streamed_pages_total", streamed - self._counted_streamed)
        self._counted_streamed = streamed
        durable = self._durable
        counters.add("flexkv_disk_durable_pages_total", durable - self._counted_durable)
        self._counted_durable = durable

    def _count_costs(self, counters: Counters) -> None:
        cost = self._manager.cost
        for number, tier in self._disks.items():
            if tier.sink is not None:
                # Tiers that are only read, such as other units' folders, have no metric for their costs.
                counters.set("flexkv_disk_page_seconds", cost.fetch(number).line()[1], what="read")
                counters.set("flexkv_disk_page_seconds", cost.straight(number).line()[1], what="gds")
        counters.set("flexkv_disk_page_seconds", cost.load.line()[1], what="load")
        counters.set("flexkv_compute_token_seconds", cost.compute.line()[1])
