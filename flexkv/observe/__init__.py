"""Observability: the table of metrics, the reasons why pages are lost and lookups miss, counters that can be sent
between processes, logging, spans, thread names, the identity of the running flexkv package, and the time of day.

This is a leaf package: every other package of flexkv may import it, and it imports none of them.
"""

from flexkv.observe.blend_results import BlendResult
from flexkv.observe.counters import Counters, merge_values
from flexkv.observe.failed_ops import FailedOps
from flexkv.observe.log import configure_logging, get_logger, log_package, warn_once
from flexkv.observe.metrics import METRICS, Metric, MetricKind
from flexkv.observe.miss_reasons import MissReason
from flexkv.observe.named_thread import NamedThread, name_this_thread
from flexkv.observe.page_losses import PageLoss
from flexkv.observe.spans import OpSpans
from flexkv.observe.unix_clock import unix_now_ms, unix_now_s

__all__ = [
    "METRICS",
    "BlendResult",
    "Counters",
    "FailedOps",
    "Metric",
    "MetricKind",
    "MissReason",
    "NamedThread",
    "OpSpans",
    "PageLoss",
    "configure_logging",
    "get_logger",
    "log_package",
    "merge_values",
    "name_this_thread",
    "unix_now_ms",
    "unix_now_s",
    "warn_once",
]
