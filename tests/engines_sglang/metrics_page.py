"""The Prometheus page of a running SGLang engine, and flexkv's series on it."""

from __future__ import annotations

import time

from prometheus_client.parser import text_string_to_metric_families

from demo.sglang_process import SglangProcess
from flexkv.observe import METRICS, MetricKind

BEHIND_DEADLINE_S = 60.0
"""The page lags by half a second, and by more if all cores are busy."""
QUIET_S = 3.0
"""A page that has not changed for so long is complete; reports are half a second apart."""

Series = tuple[str, frozenset[tuple[str, str]]]
"""Name without the engine's prefix, and labels."""

Page = dict[Series, float]


def series(name: str, **labels: str) -> Series:
    return name, frozenset(labels.items())


def flexkv_series(engine: SglangProcess) -> Page:
    """flexkv's series on the page, by name and labels; for histograms, their counts."""
    families = text_string_to_metric_families(engine.call("metrics_page"))
    prefix = "sglang:"
    return {
        series(sample.name.removeprefix(prefix), **sample.labels): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith(f"{prefix}flexkv_") and not sample.name.endswith(("_bucket", "_sum"))
    }


def all_series(unit: str) -> set[Series]:
    """Every series of the table that a unit exports."""
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
    """The page of an idle engine, once it is complete: the page lags, and more so on a busy machine."""
    ends_s = time.monotonic() + BEHIND_DEADLINE_S
    page, since_s = flexkv_series(engine), time.monotonic()
    while time.monotonic() - since_s < QUIET_S:
        assert time.monotonic() < ends_s, "the page never came to rest"
        time.sleep(0.2)
        if (now := flexkv_series(engine)) != page:
            page, since_s = now, time.monotonic()
    return page


def grown(engine: SglangProcess, before: Page, name: Series) -> Page:
    """By how much each series exceeds `before`, once the series of this name does and the page is complete."""
    ends_s = time.monotonic() + BEHIND_DEADLINE_S
    while flexkv_series(engine)[name] == before[name]:
        assert time.monotonic() < ends_s, f"{name} is still {before[name]:g}"
        time.sleep(0.2)
    return {key: value - before[key] for key, value in settled(engine).items()}
