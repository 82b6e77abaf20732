"""Reports flexkv's counters in engines that have no hook for a connector's metrics. The counters are logged
periodically if any has changed. If the engine collects metrics from files, its Prometheus page shows them too.

SGLang (with `--enable-metrics`) sets PROMETHEUS_MULTIPROC_DIR to a folder before it starts its processes. The metrics
that a process registers with prometheus_client go to files in that folder, and the server's page shows the files of all
processes.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from flexkv.adapters.common.prometheus_series import PrometheusSeries, register_metrics
from flexkv.observe import METRICS, Counters, MetricKind, get_logger, merge_values

logger = get_logger(__name__)

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"

EXPORT_EVERY_S = 0.5
"""Seconds between two updates of the Prometheus page, which is scraped every few seconds."""


class MetricReport:
    """Reports a process's counters. Not thread-safe: only the thread that updates the counters may call it.

    Args:
        counters: the counters to report. The observations of histograms are removed after each report, because they
            would accumulate; everything else is left unchanged.
        gauges: function that sets the gauges in the counters. Called before each report.
        logger: the logger for the periodic lines.
        prefix: see `register_metrics`.
        labels: labels that distinguish this process from the engine's other processes.
        log_every_s: seconds between two lines in the log.
        clock: monotonic time in seconds; for tests.
    """

    def __init__(
        self,
        counters: Counters,
        gauges: Callable[[Counters], None],
        logger: logging.Logger,
        prefix: str,
        labels: Mapping[str, str],
        log_every_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counters = counters
        self._gauges = gauges
        self._logger = logger
        self._name = ", ".join(f"{name} {value}" for name, value in labels.items())
        self._log_every_s = log_every_s
        self._clock = clock
        self._files = _files_where_collected(prefix, labels)
        self._interval, self._seen = Counters(), Counters()
        self._export_at_s = 0.0
        self._logged_at_s = clock()

    def report_if_due(self) -> None:
        """Updates the Prometheus page and logs a line, each if it is due. If neither is due, only reads the clock."""
        now_s = self._clock()
        if now_s < self._export_at_s:
            return
        self._export_at_s = now_s + EXPORT_EVERY_S
        self._take()
        passed_s = now_s - self._logged_at_s
        if passed_s >= self._log_every_s:
            if _has_counts(self._interval):
                self._log(f"last {passed_s:.0f} s", self._interval)
            self._interval, self._logged_at_s = Counters(), now_s

    def close(self) -> None:
        """Adds the remaining counts to the Prometheus page, and logs the sums since the start."""
        self._take()
        self._log("since the start", self._counters)

    def _take(self) -> None:
        """Adds the counts since the last call to the Prometheus page and to the sums for the next log line."""
        self._gauges(self._counters)
        new: dict[str, Any] = {}
        for name, values in list(self._counters.data.items()):
            if METRICS[name].kind is MetricKind.HISTOGRAM:
                new[name] = self._counters.data.pop(name)
            elif METRICS[name].kind is MetricKind.GAUGE:
                new[name] = dict(values)
            else:
                seen = self._seen.data.get(name, {})
                grown = {series: value - seen.get(series, 0) for series, value in values.items()}
                if grown := {series: value for series, value in grown.items() if value}:
                    new[name] = grown
                self._seen.data[name] = dict(values)
        if self._files is not None:
            self._files.add(new)
        merge_values(self._interval.data, new)

    def _log(self, when: str, counters: Counters) -> None:
        numbers = ", ".join(f"{name}={value:g}" for name, value in counters.summary().items())
        self._logger.info("metrics of %s, %s: %s", self._name, when, numbers or "nothing was counted")


def _has_counts(counters: Counters) -> bool:
    """Whether `counters` contains any counter or histogram; gauges do not count."""
    return any(METRICS[name].kind is not MetricKind.GAUGE for name in counters.data)


def _files_where_collected(prefix: str, labels: Mapping[str, str]) -> PrometheusSeries | None:
    """This process's metrics, written to files in the folder from which the engine collects them. None if the engine
    collects no files, or if the files cannot be written; in the latter case the error is logged.
    """
    if FOLDER_VARIABLE not in os.environ:
        return None
    try:
        # The package is imported here, because only engines that have a Prometheus page install the package.
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        # Each report has its own registry, because two caches in one process have metrics with the same names. Nothing
        # needs a common registry: the engine collects only the files.
        registry = CollectorRegistry()
        make = {
            MetricKind.COUNTER: partial(Counter, registry=registry),
            MetricKind.GAUGE: partial(Gauge, registry=registry),
            MetricKind.HISTOGRAM: partial(Histogram, registry=registry),
        }
        files = PrometheusSeries(register_metrics(prefix, list(labels), make), list(labels.values()))
        # Gauges are set to 0 at once, because the engine does not collect a gauge that was never set.
        gauges = [metric for metric in METRICS.values() if metric.kind is MetricKind.GAUGE]
        files.add({metric.name: dict.fromkeys(metric.all_series(), 0) for metric in gauges})
        return files
    except (ImportError, ValueError, OSError) as error:
        logger.warning("no metrics for the engine's Prometheus page: %s", error)
        return None
