"""Requests of failed steps are never stored, and the memory for their ids never exceeds the bound."""

from __future__ import annotations

import logging
import random

import pytest

from flexkv.adapters.tensorrt_llm import no_store
from flexkv.adapters.tensorrt_llm.no_store import NoStoreRequests


def test_each_is_taken_once() -> None:
    requests = NoStoreRequests()
    requests.add([3, 5])
    requests.add([5])
    assert not requests.take(4)
    assert requests.take(5)
    assert not requests.take(5)
    assert len(requests) == 1


@pytest.mark.parametrize("ascending", [True, False])
def test_the_bound_forgets_none(monkeypatch: pytest.MonkeyPatch, ascending: bool) -> None:
    """An id that was added and not taken counts for ever; if ids ascend, no newer id counts."""
    monkeypatch.setattr(no_store, "MAX_NO_STORE", 8)
    ids = list(range(100))
    if not ascending:
        random.Random(0).shuffle(ids)
    requests = NoStoreRequests()
    for first in range(0, 60, 3):
        requests.add(ids[first : first + 3])
        assert len(requests) <= 8
    assert all(requests.take(request_id) for request_id in ids[:60])
    if ascending:
        assert not any(requests.take(request_id) for request_id in ids[60:])


@pytest.mark.parametrize("dummy", [no_store.FIRST_DUMMY, (1 << 64) - 1])
def test_a_dummy_of_the_engine_spoils_no_request(monkeypatch: pytest.MonkeyPatch, dummy: int) -> None:
    """Its id is above all others: if it counted for their bound, nothing would ever be stored again."""
    monkeypatch.setattr(no_store, "MAX_NO_STORE", 8)
    requests = NoStoreRequests()
    requests.add([dummy, *range(100)])
    assert len(requests) == 8
    assert requests.take(dummy), "forgotten by name, and not forgotten"
    assert all(requests.take(request_id) for request_id in range(100))
    assert not any(requests.take(request_id) for request_id in (100, 1000, no_store.FIRST_DUMMY - 1))


def test_the_bound_of_the_requests_spoils_no_dummy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(no_store, "MAX_NO_STORE", 8)
    requests = NoStoreRequests()
    requests.add(range(100))
    assert not requests.take(no_store.FIRST_DUMMY)


def test_stores_that_the_bound_alone_drops_are_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(no_store, "MAX_NO_STORE", 8)
    monkeypatch.setattr(logging.getLogger("flexkv"), "propagate", True)
    requests = NoStoreRequests()
    requests.add(range(1, 100, 2))
    assert requests.take(99)
    assert requests.take(85)
    assert not caplog.messages, "these are known by name"
    assert requests.take(82)
    assert requests.take(2)
    (said,) = caplog.messages
    assert "request 82 and all up to 83 are not stored" in said
