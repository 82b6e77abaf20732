"""Values of the metrics since they were last taken: plain data that adds up over ranks and intervals."""

from __future__ import annotations

import copy
from typing import Any, cast

from flexkv.observe.metrics import METRICS, Metric, MetricKind

MAX_SAMPLES = 65_536
"""Observations kept of one histogram series between two takes (512 KiB); an engine takes them every step."""

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
        metric = _metric(name, MetricKind.COUNTER)
        if amount < 0:
            raise ValueError(f"{name}: a counter only grows, got {amount}")
        series = metric.series(labels)
        if amount:
            values = self._numbers(name)
            values[series] = values.get(series, 0) + amount

    def set(self, name: str, value: float, **labels: str) -> None:
        """Sets a gauge.

        Raises:
            ValueError: no such gauge, or wrong labels.
        """
        series = _metric(name, MetricKind.GAUGE).series(labels)
        self._numbers(name)[series] = value

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Records one observation of a histogram.

        Raises:
            ValueError: no such histogram, or wrong labels.
        """
        self._extend(name, _metric(name, MetricKind.HISTOGRAM).series(labels), [value])

    def merge(self, other: Counters) -> Counters:
        """Takes in `other`, which is as new or newer; returns self."""
        for name, values in other.data.items():
            kind = METRICS[name].kind
            for series, value in values.items():
                if kind is MetricKind.HISTOGRAM:
                    self._extend(name, series, value)
                elif kind is MetricKind.COUNTER:
                    mine = self._numbers(name)
                    mine[series] = mine.get(series, 0) + value
                else:
                    self._numbers(name)[series] = value
        return self

    def take(self) -> Counters:
        """Moves the values out: returns them and starts again empty."""
        taken = Counters()
        taken.data, self.data = self.data, {}
        return taken

    def value(self, name: str, **labels: str) -> float:
        """A counter's or gauge's value, 0 if it was never touched."""
        return float(self.data.get(name, {}).get(_metric(name).series(labels), 0))

    def samples(self, name: str, **labels: str) -> list[float]:
        """A histogram's observations."""
        return list(self.data.get(name, {}).get(_metric(name, MetricKind.HISTOGRAM).series(labels), []))

    def __bool__(self) -> bool:
        return bool(self.data)

    def summary(self) -> dict[str, float]:
        """One number a series for a log line: sums, levels, and the mean of a histogram.

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

    def _numbers(self, name: str) -> dict[str, float]:
        return cast("dict[str, float]", self.data.setdefault(name, {}))

    def _extend(self, name: str, series: str, values: list[float]) -> None:
        kept: list[float] = self.data.setdefault(name, {}).setdefault(series, [])
        room = MAX_SAMPLES - len(kept)
        kept.extend(values[:room])
        if len(values) > room:
            self.add(LOST_SAMPLES, len(values) - room)


def _metric(name: str, kind: MetricKind | None = None) -> Metric:
    metric = METRICS.get(name)
    if metric is None or (kind is not None and metric.kind is not kind):
        wanted = [m.name for m in METRICS.values() if kind is None or m.kind is kind]
        raise ValueError(f"{name!r} is no {kind.value if kind else 'metric'}: there are {', '.join(wanted)}")
    return metric
