"""Values of the metrics since the last call of `Counters.take`, as plain data that can be added up over ranks and
intervals."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from flexkv.observe.metrics import METRICS, Metric, MetricKind

MAX_SAMPLES = 65_536
"""Maximum number of observations per series of a histogram between two calls of `Counters.take` (512 KiB). Engines call
`take` in every step."""

LOST_SAMPLES = "flexkv_lost_samples_total"


class Counters:
    """Metric values of one process. Not thread-safe: one thread records and takes them.

    `data` is a plain dict (metric name -> series -> number, or list of numbers for a histogram), so pickle, msgpack and
    JSON can all encode it.
    """

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        """Starts empty, or with a copy of the `data` of other counters.

        Raises:
            ValueError: `data` has a metric that does not exist.
        """
        for name in data or {}:
            _metric(name)
        self.data: dict[str, Any] = copy.deepcopy(data) if data else {}

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Adds to a counter.

        Raises:
            ValueError: there is no such counter, the labels are wrong, or the amount is negative.
        """
        series = _COUNTERS.get((name, *labels.items()))
        if series is None:
            series = _metric(name, MetricKind.COUNTER).series(labels)
        if amount < 0:
            raise ValueError(f"{name}: a counter only grows, got {amount}")
        if amount:
            values = self.data.setdefault(name, {})
            values[series] = values.get(series, 0) + amount

    def set(self, name: str, value: float, **labels: str) -> None:
        """Sets a gauge.

        Raises:
            ValueError: there is no such gauge, or the labels are wrong.
        """
        series = _GAUGES.get((name, *labels.items()))
        if series is None:
            series = _metric(name, MetricKind.GAUGE).series(labels)
        self.data.setdefault(name, {})[series] = value

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Records one observation of a histogram. If the series already has `MAX_SAMPLES` observations, only counts the
        new one as lost.

        Raises:
            ValueError: there is no such histogram, or the labels are wrong.
        """
        series = _HISTOGRAMS.get((name, *labels.items()))
        if series is None:
            series = _metric(name, MetricKind.HISTOGRAM).series(labels)
        kept = self.data.setdefault(name, {}).setdefault(series, [])
        if len(kept) < MAX_SAMPLES:
            kept.append(value)
        else:
            self.add(LOST_SAMPLES)

    def take(self) -> dict[str, Any]:
        """Returns `data`, and begins again with an empty one."""
        taken, self.data = self.data, {}
        return taken

    def value(self, name: str, **labels: str) -> float:
        """Returns the value of one series of a counter or gauge; 0 if the series has no value."""
        return float(self.data.get(name, {}).get(_metric(name).series(labels), 0))

    def samples(self, name: str, **labels: str) -> list[float]:
        """Returns the observations of one series of a histogram."""
        return list(self.data.get(name, {}).get(_metric(name, MetricKind.HISTOGRAM).series(labels), []))

    def __bool__(self) -> bool:
        return bool(self.data)

    def summary(self) -> dict[str, float]:
        """Returns one number per series, for a log line: a counter's sum, a gauge's level or a histogram's mean.

        A key is the metric's name without `flexkv_` and `_total`, followed by the label values in brackets. The key of
        a mean begins with `mean_`.
        """
        numbers: dict[str, float] = {}
        for name, values in self.data.items():
            short = name.removeprefix("flexkv_").removesuffix("_total")
            for series, value in values.items():
                label = f"[{series}]" if series else ""
                if METRICS[name].kind is MetricKind.HISTOGRAM:
                    numbers[f"mean_{short}{label}"] = round(sum(value) / len(value), 6)
                else:
                    numbers[f"{short}{label}"] = value
        return numbers


def merge_values(into: dict[str, Any], newer: Mapping[str, Any]) -> None:
    """Adds `newer` to `into`; both are the `data` of `Counters`. A gauge's value in `newer` replaces its value in
    `into`.

    Raises:
        ValueError: `newer` has a metric that does not exist.
    """
    lost = 0
    for name, values in newer.items():
        metric = METRICS.get(name) or _metric(name)
        mine = into.setdefault(name, {})
        for series, value in values.items():
            if metric.kind is MetricKind.COUNTER:
                mine[series] = mine.get(series, 0) + value
            elif metric.kind is MetricKind.GAUGE:
                mine[series] = value
            else:
                kept = mine.setdefault(series, [])
                room = MAX_SAMPLES - len(kept)
                kept.extend(value[:room])
                lost += max(0, len(value) - room)
    if lost:
        counts = into.setdefault(LOST_SAMPLES, {})
        counts[""] = counts.get("", 0) + lost


def _metric(name: str, kind: MetricKind | None = None) -> Metric:
    metric = METRICS.get(name)
    if metric is None or (kind is not None and metric.kind is not kind):
        wanted = [m.name for m in METRICS.values() if kind is None or m.kind is kind]
        raise ValueError(f"{name!r} is no {kind.value if kind else 'metric'}: there are {', '.join(wanted)}")
    return metric


def _series_of(kind: MetricKind) -> MappingProxyType[tuple[Any, ...], str]:
    """Returns all series of a kind of metric. A key is the metric's name, then its (label, value) pairs in the table's
    order.
    """
    found: dict[tuple[Any, ...], str] = {}
    for metric in METRICS.values():
        if metric.kind is kind:
            names = [name for name, _ in metric.labels]
            for series in metric.all_series():
                labels = zip(names, metric.label_values(series), strict=True)
                key = (metric.name, *labels)
                found[key] = series
    return MappingProxyType(found)


# Computed once, because metrics are recorded at every step of an engine. If a call's metric and labels are not in these
# tables, the call has its labels in a different order, or the call is wrong.
_COUNTERS = _series_of(MetricKind.COUNTER)
_GAUGES = _series_of(MetricKind.GAUGE)
_HISTOGRAMS = _series_of(MetricKind.HISTOGRAM)
