"""Metrics and the settings of a request use the same word for a tier."""

from __future__ import annotations

from flexkv.facts.request_settings import TIER_NAMES
from flexkv.observe import METRICS

HOST = "host"


def values_of(metric: str) -> set[str]:
    return set(dict(METRICS[metric].labels)["tier"])


def test_every_tier_is_in_the_metrics_of_tiers_and_can_be_asked_for() -> None:
    assert values_of("flexkv_hit_blocks_total") == set(TIER_NAMES)
    assert values_of("flexkv_no_room_pages_total") == set(TIER_NAMES) - {HOST}
