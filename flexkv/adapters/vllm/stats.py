"""Gives flexkv's metrics the form in which vLLM logs them and exports them to Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from flexkv.observe import METRICS, Counters, Metric, MetricKind, merge_values

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PROMETHEUS_PREFIX = "vllm:"


class FlexKVStats(KVConnectorStats):
    """Counters in the form that vLLM carries from workers and scheduler to its loggers; `data` is their plain data."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Forgets everything."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> FlexKVStats:
        """Adds the counters of another rank or interval."""
        merge_values(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """One number per series, for vLLM's log line."""
        return dict(Counters(self.data).summary())

    def is_empty(self) -> bool:
        """Whether nothing was reported."""
        return not self.data


class FlexKVPromMetrics(KVConnectorPromMetrics):
    """Every metric of `METRICS`, registered as `vllm:flexkv_...` with the engine's labels. Every series exists from the
    start, at zero."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {metric.name: self._register(metric, metric_types) for metric in METRICS.values()}
        self._bound: dict[tuple[int, str, str], Any] = {}
        for metric in METRICS.values():
            for engine in per_engine_labelvalues:
                for series in metric.all_series():
                    self._bind(engine, metric, series)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Records the values of one interval."""
        for name, values in transfer_stats_data.items():
            metric = METRICS.get(name)
            if metric is None:
                continue
            for series, value in values.items():
                metric.add_to(self._bind(engine_idx, metric, series), value)

    def _register(self, metric: Metric, types: dict[type[PromMetric], type[PromMetricT]]) -> Any:
        labels = [*self._labelnames, *(name for name, _ in metric.labels)]
        common = {"name": PROMETHEUS_PREFIX + metric.name, "documentation": metric.help, "labelnames": labels}
        if metric.kind is MetricKind.COUNTER:
            return types[Counter](**common)
        if metric.kind is MetricKind.GAUGE:
            return types[Gauge](**common, multiprocess_mode="mostrecent")
        return types[Histogram](**common, buckets=list(metric.buckets))

    def _bind(self, engine: int, metric: Metric, series: str) -> Any:
        key = (engine, metric.name, series)
        if key not in self._bound:
            values = [*self.per_engine_labelvalues[engine], *metric.label_values(series)]
            self._bound[key] = self._metrics[metric.name].labels(*values)
        return self._bound[key]
