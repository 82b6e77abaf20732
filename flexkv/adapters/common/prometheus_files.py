"""flexkv's metrics at the Prometheus page of an engine that collects them from its processes' files.

SGLang (`--enable-metrics`) names a folder in PROMETHEUS_MULTIPROC_DIR before it starts its processes; what a process
registers with prometheus_client goes to files there, and the server's page shows the files of all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from flexkv.observe import METRICS, Metric, MetricKind, get_logger

logger = get_logger(__name__)

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


class PrometheusFiles:
    """Every series of the table, at zero from the start.

    Args:
        prefix: of each metric's name: the engine's own, so that its metrics lie together.
        labels: that tell this process from its engine's others.
    """

    def __init__(self, prefix: str, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        metrics = {metric.name: self._register(metric, prefix) for metric in METRICS.values()}
        self._series = {
            (metric.name, series): metrics[metric.name].labels(
                *self._labels.values(), *metric.label_values(series)
            )
            for metric in METRICS.values()
            for series in metric.all_series()
        }
        for (name, _), bound in self._series.items():
            if METRICS[name].kind is MetricKind.GAUGE:
                bound.set(0)  # a level that was never set is not collected

    @classmethod
    def where_collected(cls, prefix: str, labels: Mapping[str, str]) -> PrometheusFiles | None:
        """None where the engine collects no such files, or they cannot be written, which the log names."""
        if FOLDER_VARIABLE not in os.environ:
            return None
        try:
            return cls(prefix, labels)
        except (ImportError, ValueError, OSError) as error:
            logger.warning("no metrics for the engine's Prometheus page: %s", error)
            return None

    def add(self, data: Mapping[str, Any]) -> None:
        """Adds what was counted since the last call: the plain data of `Counters`."""
        for name, values in data.items():
            for series, value in values.items():
                bound = self._series[name, series]
                if METRICS[name].kind is MetricKind.COUNTER:
                    bound.inc(value)
                elif METRICS[name].kind is MetricKind.GAUGE:
                    bound.set(value)
                else:
                    for sample in value:
                        bound.observe(sample)

    def _register(self, metric: Metric, prefix: str) -> Any:
        # Only engines that have such a page bring it.
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        # Of its own: the files are what is collected, and two caches of one process have metrics of one name.
        registry = CollectorRegistry()
        labels = [*self._labels, *(name for name, _ in metric.labels)]
        name = prefix + metric.name
        if metric.kind is MetricKind.COUNTER:
            return Counter(name, metric.help, labels, registry=registry)
        if metric.kind is MetricKind.GAUGE:
            return Gauge(name, metric.help, labels, multiprocess_mode="mostrecent", registry=registry)
        return Histogram(name, metric.help, labels, buckets=metric.buckets, registry=registry)
