"""Registers flexkv's metrics with prometheus_client, or with an engine's own classes that replace it, and adds counts
to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flexkv.observe import METRICS, MetricKind


def register_metrics(
    prefix: str, labels: Sequence[str], make: Mapping[MetricKind, Callable[..., Any]]
) -> dict[str, Any]:
    """Registers every metric of `METRICS`; returns them by name.

    Args:
        prefix: the engine's own prefix, put before each metric's name so that flexkv's metrics are listed with the
            engine's.
        labels: names of labels that every metric gets, before its own labels.
        make: for each kind of metric, a class that takes the keyword arguments of prometheus_client's class.
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
    """All series of `METRICS` with one set of values for the common labels, which every metric has. Each series exists
    from the start, with the value zero.

    Args:
        registered: the result of `register_metrics`.
        values: the values of the common labels, in the order of `labels` in `register_metrics`.
    """

    def __init__(self, registered: Mapping[str, Any], values: Sequence[object]) -> None:
        self._series = {
            (metric.name, series): registered[metric.name].labels(*values, *metric.label_values(series))
            for metric in METRICS.values()
            for series in metric.all_series()
        }

    def add(self, data: Mapping[str, Any]) -> None:
        """Adds the counts since the last call, given as the plain data of `Counters`. Skips series that `METRICS`
        lacks, which a process with a different version of flexkv may have sent."""
        for name, values in data.items():
            for series, value in values.items():
                if (bound := self._series.get((name, series))) is not None:
                    METRICS[name].add_to(bound, value)
