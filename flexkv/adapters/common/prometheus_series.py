"""Registers flexkv's metrics with prometheus_client, or with an engine's classes in its place, and adds counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flexkv.observe import METRICS, MetricKind


def register_metrics(
    prefix: str, labels: Sequence[str], make: Mapping[MetricKind, Callable[..., Any]]
) -> dict[str, Any]:
    """Registers every metric of `METRICS`; returns them by name.

    Args:
        prefix: put before each metric's name: the engine's own prefix, so that its metrics are listed together.
        labels: names of the labels that come before those of each metric.
        make: the class of each kind of metric, with the keywords of prometheus_client's.
    """
    registered = {}
    for metric in METRICS.values():
        more: dict[str, Any] = {}
        if metric.kind is MetricKind.GAUGE:
            more["multiprocess_mode"] = "mostrecent"
        elif metric.kind is MetricKind.HISTOGRAM:
            more["buckets"] = list(metric.buckets)
        names = [*labels, *(name for name, _ in metric.labels)]
        registered[metric.name] = make[metric.kind](
            name=prefix + metric.name, documentation=metric.help, labelnames=names, **more
        )
    return registered


class PrometheusSeries:
    """Every series of `METRICS` that has these values of the first labels, at zero from the start."""

    def __init__(self, registered: Mapping[str, Any], values: Sequence[object]) -> None:
        self._series = {
            (metric.name, series): registered[metric.name].labels(*values, *metric.label_values(series))
            for metric in METRICS.values()
            for series in metric.all_series()
        }

    def add(self, data: Mapping[str, Any]) -> None:
        """Adds the counts since the last call, as the plain data of `Counters`; leaves out series that `METRICS` lacks,
        which the process of another flexkv may have sent."""
        for name, values in data.items():
            for series, value in values.items():
                if (bound := self._series.get((name, series))) is not None:
                    METRICS[name].add_to(bound, value)
