"""What flexkv says about itself: the table of metrics, counters that travel between processes, and logging.

A leaf: every package may use it, it uses none.
"""

from flexkv.observe.counters import Counters
from flexkv.observe.log import configure_logging, get_logger, warn_once
from flexkv.observe.metrics import METRICS, Metric, MetricKind

__all__ = ["METRICS", "Counters", "Metric", "MetricKind", "configure_logging", "get_logger", "warn_once"]
