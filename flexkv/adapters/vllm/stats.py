"""Converts flexkv's metrics to the form in which vLLM logs them and exports them to Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from flexkv.adapters.common.prometheus_series import PrometheusSeries, register_metrics
from flexkv.observe import Counters, MetricKind, merge_values

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PROMETHEUS_PREFIX = "vllm:"


class FlexKVStats(KVConnectorStats):
    """Counters in the form in which vLLM sends them from workers and scheduler to its loggers. `data` is the plain data
    of a `Counters`."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> FlexKVStats:
        """Adds the counters of another rank or interval."""
        merge_values(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Returns one number per series, for vLLM's log line."""
        return dict(Counters(self.data).summary())

    def is_empty(self) -> bool:
        return not self.data


class FlexKVPromMetrics(KVConnectorPromMetrics):
    """Registers every metric of `METRICS` as `vllm:flexkv_...` with the engine's labels. Every series exists from the
    start, with the value zero."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        make: dict[MetricKind, Any] = {
            MetricKind.COUNTER: metric_types[Counter],
            MetricKind.GAUGE: metric_types[Gauge],
            MetricKind.HISTOGRAM: metric_types[Histogram],
        }
        registered = register_metrics(PROMETHEUS_PREFIX, self._labelnames, make)
        self._series = {
            engine: PrometheusSeries(registered, values) for engine, values in per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Records the values of one interval."""
        self._series[engine_idx].add(transfer_stats_data)
