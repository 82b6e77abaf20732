"""Values of the metrics since they were last taken: plain data that can be added over ranks and intervals."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from flexkv.observe.metrics import METRICS, Metric, MetricKind

MAX_SAMPLES = 65_536
"""How many observations are kept per histogram series between two takes (512 KiB); an engine takes them every step."""

LOST_SAMPLES = "flexkv_lost_samples_total"


class Counters:
    """Metric values of one process. Not thread-safe: one thread records and takes.

    `data` is plain (metric name -> series -> number, or list of numbers for a histogram), so it goes through pickle,
    msgpack and JSON alike.
    """

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        """Starts empty, or from the `data` of other counters (copied).

        Raises:
            ValueError: `data` names a metric that does not exist.
        """
        for name in data or {}:
            _metric(name)
        self.data: dict[str, Any] = copy.deepcopy(data) if data else {}

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Adds to a counter.

        Raises:
            ValueError: no such counter, wrong labels, or a negative amount.
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
            ValueError: no such gauge, or wrong labels.
        """
        series = _GAUGES.get((name, *labels.items()))
        if series is None:
            series = _metric(name, MetricKind.GAUGE).series(labels)
        self.data.setdefault(name, {})[series] = value

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Records one observation of a histogram.

        Raises:
            ValueError: no such histogram, or wrong labels.
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
        """Returns `data` and starts again empty."""
        taken, self.data = self.data, {}
        return taken

    def value(self, name: str, **labels: str) -> float:
        """A counter's or gauge's value; 0 if it was never set."""
        return float(self.data.get(name, {}).get(_metric(name).series(labels), 0))

    def samples(self, name: str, **labels: str) -> list[float]:
        """A histogram's observations."""
        return list(self.data.get(name, {}).get(_metric(name, MetricKind.HISTOGRAM).series(labels), []))

    def __bool__(self) -> bool:
        return bool(self.data)

    def summary(self) -> dict[str, float]:
        """One number per series, for a log line: a counter's sum, a gauge's level, a histogram's mean.

        Names lose their prefix and `_total`; label values follow in brackets.
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
    """Adds `newer`, the `data` of other counters, to `into`. A gauge takes its value from `newer`.

    Raises:
        ValueError: `newer` names a metric that does not exist.
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
    """The series of every metric of a kind, by the metric's name and its labels in the table's order."""
    found: dict[tuple[Any, ...], str] = {}
    for metric in METRICS.values():
        if metric.kind is kind:
            names = [name for name, _ in metric.labels]
            for series in metric.all_series():
                labels = zip(names, metric.label_values(series), strict=True)
                key = (metric.name, *labels)
                found[key] = series
    return MappingProxyType(found)


# For the lookups at each step of an engine. A call that misses this table has its labels in another order, or
# fails.
_COUNTERS = _series_of(MetricKind.COUNTER)
_GAUGES = _series_of(MetricKind.GAUGE)
_HISTOGRAMS = _series_of(MetricKind.HISTOGRAM)
