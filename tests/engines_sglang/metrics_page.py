"""Reads flexkv's series from the Prometheus page of a running SGLang engine."""

from __future__ import annotations

import time

from prometheus_client.parser import text_string_to_metric_families

from demo.sglang_process import SglangProcess
from flexkv.observe import METRICS, MetricKind

BEHIND_DEADLINE_S = 60.0
"""Time limit, in seconds, for updates of the page. They come half a second late, and later if all cores are busy."""
QUIET_S = 3.0
"""Seconds without a change after which a page counts as complete. The engine reports every half second."""

Series = tuple[str, frozenset[tuple[str, str]]]
"""A series: its name without the engine's prefix, and its labels."""

Page = dict[Series, float]


def series(name: str, **labels: str) -> Series:
    return name, frozenset(labels.items())


def flexkv_series(engine: SglangProcess) -> Page:
    """Reads the values of flexkv's series from the metrics page. For histograms, reads only the counts."""
    families = text_string_to_metric_families(engine.call("metrics_page"))
    prefix = "sglang:"
    return {
        series(sample.name.removeprefix(prefix), **sample.labels): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith(f"{prefix}flexkv_") and not sample.name.endswith(("_bucket", "_sum"))
    }


def all_series(unit: str) -> set[Series]:
    """Returns all series that a unit must export according to `METRICS`."""
    return {
        series(
            metric.name + ("_count" if metric.kind is MetricKind.HISTOGRAM else ""),
            unit=unit,
            **dict(zip((name for name, _ in metric.labels), metric.label_values(values), strict=True)),
        )
        for metric in METRICS.values()
        for values in metric.all_series()
    }


def settled(engine: SglangProcess) -> Page:
    """Waits until the metrics page of an idle engine does not change any more, and returns it."""
    ends_s = time.monotonic() + BEHIND_DEADLINE_S
    page, since_s = flexkv_series(engine), time.monotonic()
    while time.monotonic() - since_s < QUIET_S:
        assert time.monotonic() < ends_s, "the page never came to rest"
        time.sleep(0.2)
        if (now := flexkv_series(engine)) != page:
            page, since_s = now, time.monotonic()
    return page


def grown(engine: SglangProcess, before: Page, name: Series) -> Page:
    """Waits until the series `name` differs from `before` and the page does not change any more. Returns by how much
    each series has grown.
    """
    ends_s = time.monotonic() + BEHIND_DEADLINE_S
    while flexkv_series(engine)[name] == before[name]:
        assert time.monotonic() < ends_s, f"{name} is still {before[name]:g}"
        time.sleep(0.2)
    return {key: value - before[key] for key, value in settled(engine).items()}
