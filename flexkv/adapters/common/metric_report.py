"""Makes counters visible while an engine runs that has no hook for a connector's metrics: a line in the log once a
minute in which something was counted, and the engine's Prometheus page where it collects files."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from flexkv.adapters.common.prometheus_files import PrometheusFiles
from flexkv.observe import METRICS, Counters, MetricKind

EXPORT_EVERY_S = 0.5
"""How far a Prometheus page is behind; a scrape comes every few seconds."""


class MetricReport:
    """Follows a process's counters. Not thread-safe: the thread that counts calls it.

    Args:
        counters: stay as they are, but for histograms, whose single observations would pile up.
        gauges: sets the gauges in them.
        prefix, labels: see `PrometheusFiles`.
        log_every_s: seconds between two lines in the log.
        clock: in seconds; for tests.
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
        self._files = PrometheusFiles.where_collected(prefix, labels)
        self._interval, self._seen = Counters(), Counters()
        self._export_at_s = 0.0
        self._logged_at_s = clock()

    def report_if_due(self) -> None:
        """Costs a look at the clock where nothing is due."""
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
        """Reports what is left, and logs the sums since the start."""
        self._take()
        self._log("since the start", self._counters)

    def _take(self) -> None:
        """What was counted since the last call goes to the page and the interval."""
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
        self._interval.merge(Counters(new))

    def _log(self, when: str, counters: Counters) -> None:
        numbers = ", ".join(f"{name}={value:g}" for name, value in counters.summary().items())
        self._logger.info("metrics of %s, %s: %s", self._name, when, numbers or "nothing was counted")


def _has_counts(counters: Counters) -> bool:
    """Whether anything beside levels was counted."""
    return any(METRICS[name].kind is not MetricKind.GAUGE for name in counters.data)
