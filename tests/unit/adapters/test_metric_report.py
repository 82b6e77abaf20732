"""Some engines have no hook for a connector's metrics. For them, flexkv writes lines to the log and exports its own
Prometheus series.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from flexkv.adapters.common.metric_report import EXPORT_EVERY_S, MetricReport
from flexkv.observe import METRICS, Counters, MetricKind, get_logger

ROOT = Path(__file__).resolve().parents[3]
EVERY_S = 60.0


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def pass_(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("INFO", "flexkv")
    return caplog


def make(counters: Counters) -> tuple[MetricReport, Clock]:
    clock = Clock()

    def gauges(into: Counters) -> None:
        into.set("flexkv_host_slots", 7)

    logger = get_logger("flexkv.test_metric_report")
    return MetricReport(counters, gauges, logger, "x:", {"unit": "tp0"}, EVERY_S, clock), clock


def test_each_interval_in_which_something_was_counted_is_one_line(log: pytest.LogCaptureFixture) -> None:
    counters = Counters()
    report, clock = make(counters)
    for tokens in (5, 3):
        counters.add("flexkv_hit_tokens_total", tokens)
        report.report_if_due()
        clock.pass_(EVERY_S / 4)
    report.report_if_due()
    assert log.messages == []
    clock.pass_(EVERY_S / 2)
    report.report_if_due()
    assert log.messages == ["metrics of unit tp0, last 60 s: hit_tokens=8, host_slots=7"]
    # An interval without changes logs nothing. The next report contains only the changes since the last one.
    clock.pass_(EVERY_S)
    report.report_if_due()
    assert len(log.messages) == 1
    counters.add("flexkv_hit_tokens_total", 2)
    clock.pass_(EVERY_S)
    report.report_if_due()
    assert log.messages[1:] == ["metrics of unit tp0, last 60 s: hit_tokens=2, host_slots=7"]
    report.close()
    assert log.messages[2] == "metrics of unit tp0, since the start: hit_tokens=10, host_slots=7"


def test_observations_do_not_pile_up_and_counters_stay() -> None:
    counters = Counters()
    report, clock = make(counters)
    for _ in range(3):
        counters.observe("flexkv_transfer_seconds", 0.1, direction="load")
        counters.add("flexkv_resets_total")
        clock.pass_(EXPORT_EVERY_S)
        report.report_if_due()
        assert counters.samples("flexkv_transfer_seconds", direction="load") == []
    assert counters.value("flexkv_resets_total") == 3


def test_nothing_is_looked_at_more_often_than_is_due() -> None:
    looks: list[Counters] = []
    clock = Clock()
    logger = get_logger("flexkv.test_metric_report")
    report = MetricReport(Counters(), looks.append, logger, "x:", {"unit": "tp0"}, EVERY_S, clock)
    for _ in range(10):
        report.report_if_due()
    assert len(looks) == 1


PROGRAM = """
import json, sys
from flexkv.adapters.common.metric_report import MetricReport
from flexkv.observe import Counters, get_logger

now = [0.0]
reports = []
for unit in ("tp0", "tp1"):
    counters, labels = Counters(), {"unit": unit}
    gauges = lambda into: into.set("flexkv_disks", 2)
    report = MetricReport(counters, gauges, get_logger("x"), "sglang:", labels, 60.0, lambda: now[0])
    reports.append((counters, report))
print("started", flush=True)
sys.stdin.readline()
for counters, report in reports:
    for amount in (3, 4):
        counters.add("flexkv_failed_pages_total", amount, direction="load", reason="deadline")
        counters.observe("flexkv_transfer_seconds", 0.02, direction="load")
        now[0] += 1.0
        report.report_if_due()
print("counted", flush=True)
sys.stdin.readline()
"""
"""A program that stands for an engine's process with two caches."""


def test_an_engines_page_has_every_series_at_zero_and_then_what_was_counted(tmp_path: Path) -> None:
    environ = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environ,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "started\n"
        page = scrape(tmp_path)
        for metric in METRICS.values():
            suffix = "_count" if metric.kind is MetricKind.HISTOGRAM else ""
            for series in metric.all_series():
                values = dict(
                    zip((name for name, _ in metric.labels), metric.label_values(series), strict=True)
                )
                for unit in ("tp0", "tp1"):
                    key = (
                        f"sglang:{metric.name}{suffix}",
                        json.dumps({"unit": unit, **values}, sort_keys=True),
                    )
                    assert page[key] == 0
        print(file=process.stdin, flush=True)
        assert process.stdout.readline() == "counted\n"
        page = scrape(tmp_path)
        failed = json.dumps({"direction": "load", "reason": "deadline", "unit": "tp1"}, sort_keys=True)
        assert page["sglang:flexkv_failed_pages_total", failed] == 7
        assert page["sglang:flexkv_disks", json.dumps({"unit": "tp0"})] == 2
        loads = json.dumps({"direction": "load", "unit": "tp0"}, sort_keys=True)
        assert page["sglang:flexkv_transfer_seconds_count", loads] == 2
    finally:
        process.communicate("\n", timeout=60)
    assert process.returncode == 0


def test_without_a_page_no_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    counters = Counters()
    report, _ = make(counters)
    counters.add("flexkv_resets_total")
    report.report_if_due()
    report.close()
    assert list(tmp_path.iterdir()) == []


def scrape(folder: Path) -> dict[Any, float]:
    """Returns the values on the metrics page of the engine's server, by (name, labels as sorted JSON)."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(folder))
    return {
        (sample.name, json.dumps(sample.labels, sort_keys=True)): sample.value
        for family in registry.collect()
        for sample in family.samples
    }
