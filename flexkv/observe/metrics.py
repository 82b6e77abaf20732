"""The table of all metrics. The Prometheus hooks and the documentation are made from it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

from flexkv.observe.blend_results import RESULTS
from flexkv.observe.miss_reasons import MissReason
from flexkv.observe.page_losses import (
    NOT_BLENDED,
    NOT_MOVED,
    NOT_ON_DISK,
    NOT_READ,
    NOT_STORED,
    NOT_WRITTEN,
    reasons_of,
)


class MetricKind(Enum):
    """How values of a metric add up."""

    COUNTER = "counter"
    """A number that only grows. Values of ranks and intervals are added up."""
    GAUGE = "gauge"
    """A level, whose latest value counts. Only the manager's process sets gauges, so two ranks never set the same."""
    HISTOGRAM = "histogram"
    """Single observations. Those of all ranks and intervals are combined."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: Prometheus name. The name of a counter ends in its unit and `_total`.
        labels: name of each label, and its possible values. These are few on purpose: no request, model or key is ever
            a label.
        buckets: upper bounds of a histogram's buckets; empty for other kinds.
    """

    name: str
    kind: MetricKind
    unit: str
    help: str
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()
    buckets: tuple[float, ...] = ()

    def series(self, labels: dict[str, str]) -> str:
        """Returns the name of the series with these label values: the values in the table's order, joined by commas.

        Raises:
            ValueError: a label is missing, unknown, or has a value that is not in the table.
        """
        if set(labels) != {name for name, _ in self.labels}:
            raise ValueError(
                f"{self.name} takes the labels {[n for n, _ in self.labels]}, got {sorted(labels)}"
            )
        for name, allowed in self.labels:
            if labels[name] not in allowed:
                raise ValueError(f"{self.name}: {name}={labels[name]!r}: allowed are {', '.join(allowed)}")
        return ",".join(labels[name] for name, _ in self.labels)

    def all_series(self) -> list[str]:
        """Returns every possible series, so that each can be exported from the start. If a counter appeared only with
        its first increment, a rate over it would miss that increment."""
        return [",".join(values) for values in itertools.product(*(values for _, values in self.labels))]

    def label_values(self, series: str) -> tuple[str, ...]:
        """Returns the label values of a series, in the table's order."""
        return tuple(series.split(",")) if self.labels else ()

    def add_to(self, series: Any, value: Any) -> None:
        """Adds a series' value from an interval's `Counters` to the same series of prometheus_client."""
        if self.kind is MetricKind.COUNTER:
            series.inc(value)
        elif self.kind is MetricKind.GAUGE:
            series.set(value)
        else:
            for sample in value:
                series.observe(sample)


_DIRECTION = ("direction", ("load", "store"))
# Bounds of buckets, from a hit of a few blocks (under a millisecond) to the default load deadline.
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

_TABLE = (
    Metric(
        "flexkv_lookup_tokens_total",
        MetricKind.COUNTER,
        "tokens",
        "Tokens that the engine did not have and asked for.",
    ),
    Metric(
        "flexkv_hit_tokens_total",
        MetricKind.COUNTER,
        "tokens",
        "Tokens promised to the engine, which need not compute them.",
    ),
    Metric(
        "flexkv_hit_blocks_total",
        MetricKind.COUNTER,
        "blocks",
        "Whole blocks that the engine took of what was promised, by the tier that they came from; what was read from "
        "disk, or from the store that machines share, for the request counts for that. Where KV groups need other "
        "pages each, a tier's blocks are reckoned by its share of the pages.",
        (("tier", ("host", "peer-host", "disk", "peers", "remote")),),
    ),
    Metric(
        "flexkv_no_room_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages of a tier that a request went on without, because host memory had no slot for them, or too many were "
        "being read, for as long as it waits: larger prompts than host memory, and what waited in vain for room.",
        (("tier", ("peer-host", "disk", "peers", "remote")),),
    ),
    Metric(
        "flexkv_moved_bytes_total", MetricKind.COUNTER, "bytes", "Bytes of pages that arrived.", (_DIRECTION,)
    ),
    Metric(
        "flexkv_moved_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages that arrived; from disk, and with `host.verify`, verified.",
        (_DIRECTION,),
    ),
    Metric(
        "flexkv_transfer_seconds",
        MetricKind.HISTOGRAM,
        "seconds",
        "From a load's or store's start to its end on one rank.",
        (_DIRECTION,),
        _SECONDS,
    ),
    Metric(
        "flexkv_failed_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages of loads and stores that did not arrive.",
        (_DIRECTION, ("reason", reasons_of(NOT_MOVED))),
    ),
    Metric(
        "flexkv_cancelled_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages of loads and stores that were called off: a client hung up while its load ran, a reset or a sleep came, "
        "SGLang's queue of loads stayed full, the engine ended. No failure; of a load past its deadline see "
        "`flexkv_failed_pages_total`.",
        (_DIRECTION,),
    ),
    Metric(
        "flexkv_unread_request_fields_total",
        MetricKind.COUNTER,
        "fields",
        "Fields of requests that flexkv could not read: a name that it does not know, a value or a type that is not "
        "allowed. The request is served; docs/requests.md says what holds instead.",
        (("reason", ("name", "value", "type")),),
    ),
    Metric(
        "flexkv_blend_requests_total",
        MetricKind.COUNTER,
        "requests",
        "Requests that ask for blending, by what became of them. All but `blended` were computed fully.",
        (("result", RESULTS),),
    ),
    Metric(
        "flexkv_blend_rows_total",
        MetricKind.COUNTER,
        "rows",
        "Rows of blended prompts that cached segments cover, per rank: `reused` after the check layer, `computed` in "
        "every layer, or computed in a step that did not have them where the scheduler said, or for which vLLM did not "
        "call the model's forward (`unplaced`), or because their segment did not come whole from disk (`lost`).",
        (("kind", ("reused", "computed", "unplaced", "lost")),),
    ),
    Metric(
        "flexkv_blend_lost_segments_total",
        MetricKind.COUNTER,
        "segments",
        "Cached segments whose pages did not arrive or did not verify, per rank. They were computed.",
    ),
    Metric(
        "flexkv_blend_missed_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages of requests' segments that were not loaded, per rank, by reason. Their tokens were computed.",
        (("reason", reasons_of(NOT_BLENDED)),),
    ),
    Metric(
        "flexkv_blend_disk_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages of segments read from disk and written to it, per rank.",
        (("direction", ("read", "write")),),
    ),
    Metric(
        "flexkv_failed_kernel_launches_total",
        MetricKind.COUNTER,
        "launches",
        "Kernels that a rank's GPU could not start, the one that copies and the one that waits for a layer. The first "
        "failure ends the use of either: runs go by the copy engine, and forwards wait for such layers on the host.",
    ),
    Metric(
        "flexkv_dropped_store_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages that were computed and not stored, so that the engine need not wait.",
        (("reason", reasons_of(NOT_STORED)),),
    ),
    Metric(
        "flexkv_lazy_missed_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Blocks that the engine evicted or dropped before a lazy store found a place for them.",
    ),
    Metric(
        "flexkv_unpublished_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages stored and thrown away: their copy or a load that their step read failed, or the weights changed.",
    ),
    Metric(
        "flexkv_refused_messages_total",
        MetricKind.COUNTER,
        "messages",
        "Orders that reached a worker of another engine, and reports that reached another engine's scheduler: refused.",
        (("kind", ("orders", "reports")),),
    ),
    Metric(
        "flexkv_missed_blocks_total",
        MetricKind.COUNTER,
        "blocks",
        "Whole blocks that were looked up and not promised. What the engine asks again counts once, with the last "
        "answer.",
        (("reason", tuple(miss.reason for miss in MissReason)),),
    ),
    Metric(
        "flexkv_manager_blocks_total",
        MetricKind.COUNTER,
        "blocks",
        "Whole blocks in the control plane: promised and not promised by lookups, each time that the engine asks; made "
        "misses because they were forgotten or found bad.",
        (("event", ("promised", "not_promised", "forgotten")),),
    ),
    Metric(
        "flexkv_manager_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages of loads and stores as the control plane counts them, once over all ranks. Discarded ones were written "
        "well and not published: revoked, forgotten or of old weights. Busy ones found no slot or queue entry.",
        (("event", ("loaded", "load_failed", "stored", "store_failed", "discarded", "busy")),),
    ),
    Metric(
        "flexkv_manager_events_total",
        MetricKind.COUNTER,
        "events",
        "Lookups, those with a partial tail, and promises that were cut because the queue of loads was full.",
        (("event", ("lookup", "tail_hit", "cut_promise")),),
    ),
    Metric("flexkv_evictions_total", MetricKind.COUNTER, "pages", "Pages evicted to make room."),
    Metric(
        "flexkv_expired_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages that left host memory because their time to live was over.",
    ),
    Metric(
        "flexkv_expired_leases_total",
        MetricKind.COUNTER,
        "leases",
        "Lookups that the engine never followed up.",
    ),
    Metric("flexkv_resets_total", MetricKind.COUNTER, "resets", "Times everything stored became invalid."),
    Metric("flexkv_host_slots", MetricKind.GAUGE, "slots", "Slots of the host tier that are up."),
    Metric(
        "flexkv_host_capacity_tokens",
        MetricKind.GAUGE,
        "tokens",
        "Tokens that those slots have room for; only for models with one KV group.",
    ),
    Metric("flexkv_host_slots_used", MetricKind.GAUGE, "slots", "Slots that hold a page or receive one."),
    Metric(
        "flexkv_weights_known",
        MetricKind.GAUGE,
        "engines",
        "1 once nothing keeps the tiers behind host memory waiting for the name of the engine's weights, 0 while these "
        "are read, or if nothing can name them. Only with such tiers.",
    ),
    Metric(
        "flexkv_inflight_ops", MetricKind.GAUGE, "ops", "Transfers planned that have not ended on every rank."
    ),
    Metric(
        "flexkv_disk_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages written to disk, or read from it and verified.",
        (("direction", ("read", "write")),),
    ),
    Metric(
        "flexkv_disk_failed_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages that a disk did not take, or did not give back as they were: damaged, torn, of another write, an error.",
        (("direction", ("read", "write")),),
    ),
    Metric(
        "flexkv_disk_lost_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages that are not on disk.",
        (("reason", reasons_of(NOT_ON_DISK)),),
    ),
    Metric(
        "flexkv_disk_evictions_total", MetricKind.COUNTER, "pages", "Pages evicted from disk to make room."
    ),
    Metric(
        "flexkv_disk_expired_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages found on disk past their time to live.",
    ),
    Metric(
        "flexkv_disk_durable_pages_total", MetricKind.COUNTER, "pages", "Written pages that survive a crash."
    ),
    Metric(
        "flexkv_disk_lookups_total",
        MetricKind.COUNTER,
        "lookups",
        "Lookups that waited for blocks from disk; `late` are those that went on without them. `computed`: lookups of "
        "which the engine was left what it computes sooner. `no_room`: lookups that went on without blocks for which "
        "host memory had no slot in time.",
        (("outcome", ("waited", "late", "computed", "no_room")),),
    ),
    Metric(
        "flexkv_disk_prefetched_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages whose read was begun while their request waited in the engine's queue (`disk.prefetch_requests`).",
    ),
    Metric(
        "flexkv_disk_left_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages on disk that were left to the engine, because it computes them sooner.",
    ),
    Metric(
        "flexkv_disk_streamed_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages loaded that had been promised while the disk still read them (`disk.stream`).",
    ),
    Metric(
        "flexkv_disk_gds_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages loaded from disk and verified, or stored there, without a page of host memory (`disk.gds`).",
        (("direction", ("read", "write")),),
    ),
    Metric(
        "flexkv_disk_page_seconds",
        MetricKind.GAUGE,
        "seconds",
        "What a page more adds to a read from disk, to a load from host memory, and to a load straight from disk, as "
        "measured lately.",
        (("what", ("read", "load", "gds")),),
    ),
    Metric(
        "flexkv_compute_token_seconds",
        MetricKind.GAUGE,
        "seconds",
        "What a token more adds to a prefill step of the engine, as measured lately. Only with a disk tier.",
    ),
    Metric("flexkv_disk_slots", MetricKind.GAUGE, "slots", "Slots on the disks in use."),
    Metric(
        "flexkv_disk_capacity_tokens",
        MetricKind.GAUGE,
        "tokens",
        "Tokens that those slots have room for; only for models with one KV group.",
    ),
    Metric(
        "flexkv_disk_slots_used", MetricKind.GAUGE, "slots", "Disk slots that hold a page or receive one."
    ),
    Metric("flexkv_disks", MetricKind.GAUGE, "disks", "Disks in use."),
    Metric("flexkv_peers", MetricKind.GAUGE, "units", "Running units whose pages this one finds."),
    Metric(
        "flexkv_peer_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages asked of the host memory of running units: copied, or a miss because the page had gone, its slot "
        "changed during the copy, a digest did not match, or a unit of another format had left.",
        (("outcome", ("copied", "absent", "changed", "digest", "format")),),
    ),
    Metric(
        "flexkv_once_pages_total",
        MetricKind.COUNTER,
        "pages",
        "With `peers.store: once`, pages that a running peer has in host memory: left out of this unit's tiers, taken "
        "over because no peer has them any more, or lost, because the last peer gave them up before that.",
        (("outcome", ("left_out", "promoted", "lost")),),
    ),
    Metric(
        "flexkv_remote_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages written to the store that machines share, or read from it and verified.",
        (("direction", ("read", "write")),),
    ),
    Metric(
        "flexkv_remote_bytes_total",
        MetricKind.COUNTER,
        "bytes",
        "Bytes of these pages, with their trailers.",
        (("direction", ("read", "write")),),
    ),
    Metric(
        "flexkv_remote_missed_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages that the store said it has and did not give as they were.",
        (("reason", reasons_of(NOT_READ)),),
    ),
    Metric(
        "flexkv_remote_dropped_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages that are not written to the store.",
        (("reason", reasons_of(NOT_WRITTEN)),),
    ),
    Metric(
        "flexkv_remote_lookups_total",
        MetricKind.COUNTER,
        "lookups",
        "What the store answered when a request's pages were asked for; `unknown`: not in time. `waited`: lookups that "
        "waited for pages from it, `late` those that went on without them, `computed` those that left them to the "
        "engine, which computes them sooner, `no_room` those that went on without pages for which host memory had no "
        "slot in time.",
        (("outcome", ("hit", "miss", "unknown", "waited", "late", "computed", "no_room")),),
    ),
    Metric(
        "flexkv_remote_page_seconds",
        MetricKind.GAUGE,
        "seconds",
        "What a page more adds to a read from the store, as measured lately.",
    ),
    Metric(
        "flexkv_remote_up",
        MetricKind.GAUGE,
        "stores",
        "1 while the store is used, 0 while it cannot be reached. Only with a remote tier.",
    ),
    Metric(
        "flexkv_remote_restarts_total",
        MetricKind.COUNTER,
        "restarts",
        "Times that the process with the store's client was started again.",
    ),
    Metric(
        "flexkv_lost_samples_total",
        MetricKind.COUNTER,
        "samples",
        "Histogram observations left out because an interval had too many.",
    ),
)

METRICS: MappingProxyType[str, Metric] = MappingProxyType({metric.name: metric for metric in _TABLE})
"""Every metric by name."""


def markdown_table() -> str:
    """Returns the table of metrics for the documentation."""
    rows = ["| metric | kind | unit | labels | meaning |", "|---|---|---|---|---|"]
    for metric in METRICS.values():
        labels = "; ".join(f"{name}: {', '.join(values)}" for name, values in metric.labels)
        rows.append(f"| `{metric.name}` | {metric.kind.value} | {metric.unit} | {labels} | {metric.help} |")
    return "\n".join(rows)
