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
    """A level, whose latest value counts. Only the manager's process sets gauges, so that two ranks never set the same
    gauge.
    """
    HISTOGRAM = "histogram"
    """Single observations. The observations of all ranks and intervals are combined."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: Prometheus name. The name of a counter ends in its unit and `_total`.
        labels: name of each label, and its possible values. There are few values on purpose: no request, model or key
            is ever a label.
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
        """Adds the value that a series has in `Counters` to the same series of prometheus_client."""
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
        "Tokens that the engine looked up in flexkv because its own cache did not have them.",
    ),
    Metric(
        "flexkv_hit_tokens_total",
        MetricKind.COUNTER,
        "tokens",
        "Tokens that the engine took from flexkv's promises, so that it need not compute them.",
    ),
    Metric(
        "flexkv_hit_blocks_total",
        MetricKind.COUNTER,
        "blocks",
        "Whole blocks that the engine took from promises, by the tier that supplied them. A block that was read for "
        "the request from disk, or from the store that machines share, counts for that tier and not for host memory. "
        "If KV groups need different pages, blocks are divided among tiers by each tier's share of the pages.",
        (("tier", ("host", "peer-host", "disk", "peers", "remote")),),
    ),
    Metric(
        "flexkv_no_room_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages of a tier that a request continued without because, until its wait was over, host memory had no slots "
        "for them or too many pages were being read. Pages of prompts that are larger than host memory count too.",
        (("tier", ("peer-host", "disk", "peers", "remote")),),
    ),
    Metric(
        "flexkv_moved_bytes_total", MetricKind.COUNTER, "bytes", "Bytes of pages that arrived.", (_DIRECTION,)
    ),
    Metric(
        "flexkv_moved_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages that arrived. Loaded pages that came from disk, and with `host.verify` all loaded pages, were verified.",
        (_DIRECTION,),
    ),
    Metric(
        "flexkv_transfer_seconds",
        MetricKind.HISTOGRAM,
        "seconds",
        "Time from the start of a load or store to its end on one rank.",
        (_DIRECTION,),
        _SECONDS,
    ),
    Metric(
        "flexkv_failed_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages of loads and stores that did not arrive, by reason.",
        (_DIRECTION, ("reason", reasons_of(NOT_MOVED))),
    ),
    Metric(
        "flexkv_cancelled_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages of loads and stores that were cancelled, which is not a failure: a client disconnected during its "
        "load, the cache was reset, the engine went to sleep or ended, or SGLang's queue of loads stayed full. Loads "
        "that missed their deadline are in `flexkv_failed_pages_total`.",
        (_DIRECTION,),
    ),
    Metric(
        "flexkv_unread_request_fields_total",
        MetricKind.COUNTER,
        "fields",
        "Fields of requests that flexkv could not read: it does not know the name, or the value or its type is not "
        "allowed. The request is served; docs/requests.md says which setting applies instead.",
        (("reason", ("name", "value", "type")),),
    ),
    Metric(
        "flexkv_blend_requests_total",
        MetricKind.COUNTER,
        "requests",
        "Requests that ask for blending, by result. All but the `blended` ones were computed fully.",
        (("result", RESULTS),),
    ),
    Metric(
        "flexkv_blend_rows_total",
        MetricKind.COUNTER,
        "rows",
        "Rows of blended prompts that cached segments cover, per rank. `reused` rows came from the cache after the "
        "check layer. All others were computed: `computed` rows in every layer, `unplaced` rows because the step did "
        "not have them where the scheduler said, or vLLM did not call the model's forward, `lost` rows because their "
        "segment did not come completely from disk.",
        (("kind", ("reused", "computed", "unplaced", "lost")),),
    ),
    Metric(
        "flexkv_blend_lost_segments_total",
        MetricKind.COUNTER,
        "segments",
        "Cached segments whose pages did not arrive or failed verification, per rank. Their tokens were computed.",
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
        "Pages of segments that were read from disk or written to it, per rank.",
        (("direction", ("read", "write")),),
    ),
    Metric(
        "flexkv_failed_kernel_launches_total",
        MetricKind.COUNTER,
        "launches",
        "Kernels that a rank's GPU could not start: the kernel that copies, or the kernel that waits for a layer. "
        "After one failure a kernel is not used again: the copy engine copies the runs, or forwards wait on the host.",
    ),
    Metric(
        "flexkv_dropped_store_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages that were computed but not stored, by reason.",
        (("reason", reasons_of(NOT_STORED)),),
    ),
    Metric(
        "flexkv_lazy_missed_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Blocks that the engine evicted or dropped before a lazy store could take them.",
    ),
    Metric(
        "flexkv_unpublished_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages stored but not published: their copy or a load that their step read failed, or the weights changed.",
    ),
    Metric(
        "flexkv_refused_messages_total",
        MetricKind.COUNTER,
        "messages",
        "Messages from another engine that a worker (`orders`) or a scheduler (`reports`) refused.",
        (("kind", ("orders", "reports")),),
    ),
    Metric(
        "flexkv_missed_blocks_total",
        MetricKind.COUNTER,
        "blocks",
        "Whole blocks that were looked up and not promised, by reason. If the engine asks about a block several "
        "times, only the last answer counts.",
        (("reason", tuple(miss.reason for miss in MissReason)),),
    ),
    Metric(
        "flexkv_manager_blocks_total",
        MetricKind.COUNTER,
        "blocks",
        "Whole blocks in the control plane. `promised` and `not_promised`: the blocks of each lookup, every time that "
        "the engine asks. `forgotten`: blocks that became misses because they were forgotten or found bad.",
        (("event", ("promised", "not_promised", "forgotten")),),
    ),
    Metric(
        "flexkv_manager_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages of loads and stores as the control plane counts them, once for all ranks. `discarded` pages were "
        "stored but not published: revoked, forgotten, of old weights, or stored during a load of their request. "
        "`busy` pages found no slot or queue entry.",
        (("event", ("loaded", "load_failed", "stored", "store_failed", "discarded", "busy")),),
    ),
    Metric(
        "flexkv_manager_events_total",
        MetricKind.COUNTER,
        "events",
        "`lookup`: lookups. `tail_hit`: partial tails that lookups promised. `cut_promise`: lookups whose promise was "
        "cut to `load.inflight_pages`.",
        (("event", ("lookup", "tail_hit", "cut_promise")),),
    ),
    Metric("flexkv_evictions_total", MetricKind.COUNTER, "pages", "Pages evicted from host memory."),
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
        "Lookups on which the engine did not act before their lease expired.",
    ),
    Metric(
        "flexkv_resets_total", MetricKind.COUNTER, "resets", "Resets, which make everything stored a miss."
    ),
    Metric("flexkv_host_slots", MetricKind.GAUGE, "slots", "Usable slots of the host tier."),
    Metric(
        "flexkv_host_capacity_tokens",
        MetricKind.GAUGE,
        "tokens",
        "Tokens for which the usable slots of the host tier have space. Only for models with one KV group.",
    ),
    Metric(
        "flexkv_host_slots_used", MetricKind.GAUGE, "slots", "Host slots that hold a page or receive one."
    ),
    Metric(
        "flexkv_weights_known",
        MetricKind.GAUGE,
        "engines",
        "1 when the tiers behind host memory need not wait for the name of the engine's weights. 0 while the weights "
        "are being read, or if nothing can name them. Only with such tiers.",
    ),
    Metric(
        "flexkv_inflight_ops", MetricKind.GAUGE, "ops", "Transfers planned and not finished on every rank."
    ),
    Metric(
        "flexkv_disk_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages that were written to disk, or were read from it and verified.",
        (("direction", ("read", "write")),),
    ),
    Metric(
        "flexkv_disk_failed_pages_total",
        MetricKind.COUNTER,
        "pages",
        "`write`: pages that a disk did not write. `read`: pages that a disk did not return as they were written. "
        "They were damaged, torn or from another write, or the disk reported an error.",
        (("direction", ("read", "write")),),
    ),
    Metric(
        "flexkv_disk_lost_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages that did not reach a disk or were lost with one, by reason.",
        (("reason", reasons_of(NOT_ON_DISK)),),
    ),
    Metric(
        "flexkv_disk_evictions_total", MetricKind.COUNTER, "pages", "Pages evicted from disk to free slots."
    ),
    Metric(
        "flexkv_disk_expired_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages that were found on disk after their time to live was over.",
    ),
    Metric(
        "flexkv_disk_durable_pages_total", MetricKind.COUNTER, "pages", "Written pages that survive a crash."
    ),
    Metric(
        "flexkv_disk_lookups_total",
        MetricKind.COUNTER,
        "lookups",
        "Lookups by what became of their blocks on disk. `waited`: the lookup waited for them. `late`: it continued "
        "without them, because they took too long. `computed`: it left them to the engine, which computes them "
        "sooner. `no_room`: it continued without blocks for which host memory had no slot in time.",
        (("outcome", ("waited", "late", "computed", "no_room")),),
    ),
    Metric(
        "flexkv_disk_prefetched_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages whose read began while their request waited in the engine's queue (`disk.prefetch_requests`).",
    ),
    Metric(
        "flexkv_disk_left_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages on disk that were left to the engine because it computes them sooner.",
    ),
    Metric(
        "flexkv_disk_streamed_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages whose load began while the disk still read them (`disk.stream`).",
    ),
    Metric(
        "flexkv_disk_gds_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages that passed between disk and engine without a slot of host memory (`disk.gds`). `read`: loaded from "
        "disk and verified. `write`: stored to disk.",
        (("direction", ("read", "write")),),
    ),
    Metric(
        "flexkv_disk_page_seconds",
        MetricKind.GAUGE,
        "seconds",
        "Time that each further page adds to a read from disk (`read`), a load from host memory (`load`) or a load "
        "straight from disk (`gds`), by recent measurements.",
        (("what", ("read", "load", "gds")),),
    ),
    Metric(
        "flexkv_compute_token_seconds",
        MetricKind.GAUGE,
        "seconds",
        "Time that each further token adds to a prefill step of the engine, by recent measurements. Needs a disk tier.",
    ),
    Metric("flexkv_disk_slots", MetricKind.GAUGE, "slots", "Slots on the disks in use."),
    Metric(
        "flexkv_disk_capacity_tokens",
        MetricKind.GAUGE,
        "tokens",
        "Tokens for which the slots on the disks in use have space. Only for models with one KV group.",
    ),
    Metric(
        "flexkv_disk_slots_used", MetricKind.GAUGE, "slots", "Disk slots that hold a page or receive one."
    ),
    Metric("flexkv_disks", MetricKind.GAUGE, "disks", "Disks in use."),
    Metric("flexkv_peers", MetricKind.GAUGE, "units", "Running units whose pages this unit finds."),
    Metric(
        "flexkv_peer_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages that were to be copied from the host memory of running units. `copied` pages arrived. The others "
        "became misses. `absent`: no unit had the page any more. `changed`: its slot changed during the copy. "
        "`digest`: a digest did not match. `format`: a unit whose pages have another format had left.",
        (("outcome", ("copied", "absent", "changed", "digest", "format")),),
    ),
    Metric(
        "flexkv_once_pages_total",
        MetricKind.COUNTER,
        "pages",
        "With `peers.store: once`, pages that a running peer had in host memory. `left_out`: not stored in this "
        "unit's tiers. `promoted`: taken over, because no peer has them any more. `lost`: dropped by the last peer "
        "that had them before this unit had a copy.",
        (("outcome", ("left_out", "promoted", "lost")),),
    ),
    Metric(
        "flexkv_remote_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages that were written to the store that machines share, or were read from it and verified.",
        (("direction", ("read", "write")),),
    ),
    Metric(
        "flexkv_remote_bytes_total",
        MetricKind.COUNTER,
        "bytes",
        "Bytes of pages and trailers that were written to the store that machines share, or read from it.",
        (("direction", ("read", "write")),),
    ),
    Metric(
        "flexkv_remote_missed_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages that the store claimed to have but did not return as they were written, by reason.",
        (("reason", reasons_of(NOT_READ)),),
    ),
    Metric(
        "flexkv_remote_dropped_pages_total",
        MetricKind.COUNTER,
        "pages",
        "Pages that were not written to the store, by reason.",
        (("reason", reasons_of(NOT_WRITTEN)),),
    ),
    Metric(
        "flexkv_remote_lookups_total",
        MetricKind.COUNTER,
        "lookups",
        "Lookups by the store's answer: `hit`, `miss`, or `unknown` if none came in time. Also lookups that waited "
        "for pages from it (`waited`), continued without them because they took too long (`late`), left pages to the "
        "engine because it computes them sooner (`computed`), or continued without pages for which host memory had no "
        "slot in time (`no_room`).",
        (("outcome", ("hit", "miss", "unknown", "waited", "late", "computed", "no_room")),),
    ),
    Metric(
        "flexkv_remote_page_seconds",
        MetricKind.GAUGE,
        "seconds",
        "Time that each further page adds to a read from the store, by recent measurements.",
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
        "Restarts of the process with the store's client.",
    ),
    Metric(
        "flexkv_lost_samples_total",
        MetricKind.COUNTER,
        "samples",
        "Histogram observations that were left out because an interval had too many.",
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
