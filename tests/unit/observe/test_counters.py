"""Counters are summed over ranks and intervals. They refuse names that are not in the table of metrics."""

from __future__ import annotations

import json
import pickle

import pytest

from flexkv.observe import METRICS, Counters, MetricKind, merge_values
from flexkv.observe.counters import MAX_SAMPLES


def test_ranks_add_up_and_levels_are_replaced() -> None:
    first, second = Counters(), Counters()
    for counters, n in ((first, 1), (second, 2)):
        counters.add("flexkv_hit_tokens_total", 10 * n)
        counters.add("flexkv_moved_bytes_total", n, direction="load")
        counters.set("flexkv_host_slots_used", n)
        counters.observe("flexkv_transfer_seconds", n / 10, direction="store")
    merge_values(first.data, second.data)
    assert first.value("flexkv_hit_tokens_total") == 30
    assert first.value("flexkv_moved_bytes_total", direction="load") == 3
    assert first.value("flexkv_moved_bytes_total", direction="store") == 0
    assert first.value("flexkv_host_slots_used") == 2
    assert first.samples("flexkv_transfer_seconds", direction="store") == [0.1, 0.2]
    assert second.value("flexkv_hit_tokens_total") == 20


def test_data_survives_pickle_and_json() -> None:
    counters = Counters()
    counters.add("flexkv_failed_pages_total", 3, direction="load", reason="deadline")
    counters.observe("flexkv_transfer_seconds", 0.5, direction="load")
    for copy in (pickle.loads(pickle.dumps(counters)), Counters(json.loads(json.dumps(counters.data)))):
        assert copy.data == counters.data
    assert counters.summary() == {"failed_pages[load,deadline]": 3, "mean_transfer_seconds[load]": 0.5}


def test_take_leaves_nothing_and_untouched_counters_are_false() -> None:
    counters = Counters()
    assert not counters
    counters.add("flexkv_resets_total", 0)
    assert not counters
    counters.add("flexkv_resets_total")
    assert counters.take() == {"flexkv_resets_total": {"": 1}}
    assert not counters
    assert counters.take() == {}


def test_too_many_samples_are_counted_instead() -> None:
    counters, more = Counters(), Counters()
    for _ in range(MAX_SAMPLES):
        counters.observe("flexkv_transfer_seconds", 0.1, direction="load")
    more.observe("flexkv_transfer_seconds", 0.1, direction="load")
    merge_values(counters.data, more.data)
    assert len(counters.samples("flexkv_transfer_seconds", direction="load")) == MAX_SAMPLES
    assert counters.value("flexkv_lost_samples_total") == 1


def test_labels_may_come_in_any_order() -> None:
    counters = Counters()
    counters.add("flexkv_failed_pages_total", 1, direction="load", reason="failed")
    counters.add("flexkv_failed_pages_total", 2, reason="failed", direction="load")
    assert counters.data == {"flexkv_failed_pages_total": {"load,failed": 3}}


def test_what_the_table_does_not_name_is_refused() -> None:
    counters = Counters()
    with pytest.raises(ValueError, match="no counter"):
        counters.add("flexkv_nonsense_total")
    with pytest.raises(ValueError, match="no gauge"):
        counters.set("flexkv_resets_total", 1)
    with pytest.raises(ValueError, match="direction"):
        counters.add("flexkv_moved_bytes_total", 1)
    with pytest.raises(ValueError, match="allowed are load, store"):
        counters.add("flexkv_moved_bytes_total", 1, direction="up")
    with pytest.raises(ValueError, match="only grows"):
        counters.add("flexkv_resets_total", -1)
    with pytest.raises(ValueError, match="no counter"):
        counters.add("flexkv_host_slots")
    with pytest.raises(ValueError, match="takes the labels"):
        counters.add("flexkv_moved_bytes_total", 1, way="load")
    with pytest.raises(ValueError, match="no metric"):
        Counters({"flexkv_nonsense": {}})
    with pytest.raises(ValueError, match="no metric"):
        merge_values(counters.data, {"flexkv_nonsense": {}})
    assert not counters


def test_names_follow_the_conventions_of_prometheus() -> None:
    for metric in METRICS.values():
        assert metric.name.startswith("flexkv_")
        assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)
        assert bool(metric.buckets) == (metric.kind is MetricKind.HISTOGRAM)
        assert list(metric.buckets) == sorted(metric.buckets)
        assert all("," not in value for _, values in metric.labels for value in values)
