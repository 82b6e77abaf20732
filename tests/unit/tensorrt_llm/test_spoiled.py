"""Requests of broken steps: never stored, and never more memory than the bound."""

from __future__ import annotations

import random

import pytest

from flexkv.adapters.tensorrt_llm import spoiled
from flexkv.adapters.tensorrt_llm.spoiled import SpoiledRequests


def test_each_is_taken_once() -> None:
    requests = SpoiledRequests()
    requests.add([3, 5])
    requests.add([5])
    assert not requests.take(4)
    assert requests.take(5)
    assert not requests.take(5)
    assert len(requests) == 1


@pytest.mark.parametrize("ascending", [True, False])
def test_the_bound_forgets_none(monkeypatch: pytest.MonkeyPatch, ascending: bool) -> None:
    """What was added and not taken is spoiled for good; with ids that ascend nothing newer counts as spoiled."""
    monkeypatch.setattr(spoiled, "MAX_SPOILED", 8)
    ids = list(range(100))
    if not ascending:
        random.Random(0).shuffle(ids)
    requests = SpoiledRequests()
    for first in range(0, 60, 3):
        requests.add(ids[first : first + 3])
        assert len(requests) <= 8
    assert all(requests.take(request_id) for request_id in ids[:60])
    if ascending:
        assert not any(requests.take(request_id) for request_id in ids[60:])
