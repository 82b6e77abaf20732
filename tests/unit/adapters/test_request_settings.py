"""Tests the settings of one request under vLLM: their names, values that cannot be read, and their effect on the
request's stores and loads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from flexkv.adapters.common.settings_reader import IF_UNREADABLE, SettingsReader
from flexkv.adapters.vllm.request_fields import RequestFields
from flexkv.facts.blend_ask import BlendAsk
from flexkv.facts.request_settings import (
    MOST_NAMESPACE_BYTES,
    NAMES,
    NO_SETTINGS,
    OWN_NAMES,
    TIER_NAMES,
    RequestSettings,
)
from flexkv.observe import Counters
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.test_request_fields import Session
from tests.unit.adapters.vllm_objects import BLOCK_TOKENS, make_request

Make = Callable[..., MiniEngine]
PROMPT = list(range(100, 123))
WHOLE = len(PROMPT) // BLOCK_TOKENS
PARAMS = "kv_transfer_params"
ALL = frozenset(TIER_NAMES)


class Read:
    """Reads the settings of a request, and records the log messages about them."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.counters, self._caplog = Counters(), caplog
        logger = logging.getLogger("tests.settings")
        self._fields = RequestFields(SettingsReader(self.counters, logger, lambda: 0.0))

    def __call__(self, **extra: Any) -> dict[str, Any]:
        return self._fields.given(make_request(PROMPT, "one", extra_args=extra))

    def said(self) -> list[str]:
        return [record.getMessage() for record in self._caplog.records if record.name == "tests.settings"]


@pytest.fixture
def read(caplog: pytest.LogCaptureFixture) -> Read:
    return Read(caplog)


VALUES: dict[str, tuple[Any, Any]] = {
    "flexkv.skip_save": (1, True),
    "skip_save": (True, True),
    "lmcache.skip_save": ("true", True),
    "flexkv.skip_load": ("True", True),
    "flexkv.max_store_tokens": (64, 64),
    "max_offload_tokens": (0, 0),
    "lmcache.max_offload_tokens": (7, 7),
    "flexkv.max_load_tokens": (64, 64),
    "max_load_tokens": (0, 0),
    "lmcache.max_tokens_per_load": (8, 8),
    "flexkv.tiers": (["disk", "remote"], frozenset(("disk", "remote"))),
    "kv_load_tiers": ([{"medium": "STORAGE", "locality": "local"}], frozenset(("disk", "peers"))),
    "flexkv.ttl_s": (60, 60),
    "flexkv.namespace": ("tenant 7", "tenant 7"),
    "flexkv.blend": ({"segments": [[3, 9]], "ratio": 1}, BlendAsk(((3, 9),), 1.0)),
}
"""By name of a setting: a value in the form in which a caller gives it, and the value that flexkv reads from it."""


def test_every_name_is_tried() -> None:
    assert VALUES.keys() == NAMES.keys()


@pytest.mark.parametrize("name", VALUES)
def test_each_name_is_read_in_each_place_that_has_it(read: Read, name: str) -> None:
    value, meant = VALUES[name]
    field = NAMES[name].field
    assert read(**{PARAMS: {name: value}}) == {field: meant}
    assert read(**{name: value}) == ({field: meant} if "." in name else {}), "extra_args are others' too"
    assert read(**{PARAMS: {name: None}}) == {field: getattr(NO_SETTINGS, field)}
    assert read.said() == []


@pytest.mark.parametrize(
    ("entries", "tiers"),
    [
        ([], ()),
        ([{}], TIER_NAMES),
        ([{"medium": "cpu"}], ("host", "peer-host")),
        ([{"medium": "STORAGE"}], ("disk", "peers", "remote")),
        ([{"locality": "REMOTE"}], ("remote",)),
        ([{"medium": "CPU"}, {"medium": "STORAGE", "locality": "REMOTE"}], ("host", "peer-host", "remote")),
        ([{"medium": "CPU", "locality": "REMOTE"}], ()),
    ],
)
def test_vllms_matchers_stand_for_tiers(read: Read, entries: Any, tiers: tuple[str, ...]) -> None:
    assert read(**{PARAMS: {"kv_load_tiers": entries}}) == {"tiers": frozenset(tiers)}


NOTHING_SHARED = {"skip_save": True, "skip_load": True}
NOT_STORED = {"skip_save": True}
NOT_TOKENS: tuple[object, ...] = (-1, True, 1.5, "64k", "-1", "٣", [], 2**63, float("nan"))
NOT_SECONDS: tuple[object, ...] = (0, *NOT_TOKENS)
NOT_TIERS: tuple[object, ...] = ("disk", ["gpu"], [1], [["disk"]], 3)
NOT_NAMES: tuple[object, ...] = ("", 7, "x" * (MOST_NAMESPACE_BYTES + 1), "\ud800", ["a"])
UNREADABLE: list[tuple[str, Any, dict[str, Any], str]] = [
    ("flexkv.skip_load", "maybe", {}, "true, false, 1 or 0"),
    *(("flexkv.max_store_tokens", value, NOT_STORED, "a whole number") for value in NOT_TOKENS),
    *(("flexkv.ttl_s", value, NOT_STORED, "a whole number from 1") for value in NOT_SECONDS),
    ("max_load_tokens", "all", {}, "a whole number"),
    *(("flexkv.tiers", value, {}, "host, disk, peers, remote") for value in NOT_TIERS),
    ("kv_load_tiers", {"medium": "CPU"}, {}, "a list of mappings"),
    ("kv_load_tiers", [{"medium": "TAPE"}], {}, "as `medium` CPU or STORAGE"),
    ("kv_load_tiers", [{"medium": 3}], {}, "as `medium` CPU or STORAGE"),
    ("kv_load_tiers", [{"locality": "FAR"}], {}, "as `locality` LOCAL or REMOTE"),
    ("kv_load_tiers", [{"tier": "CPU"}], {}, "a list of mappings"),
    *(("flexkv.namespace", value, NOTHING_SHARED, "text of 1 to") for value in NOT_NAMES),
    ("lmcache.skip_save", "maybe", {"skip_save": True}, "true, false, 1 or 0; the request is not stored"),
]


@pytest.mark.parametrize("value", [64, 64.0, "64"])
def test_a_number_of_tokens_may_be_written_as_http_carries_it(read: Read, value: object) -> None:
    assert read(**{"flexkv.max_store_tokens": value}) == {"max_store_tokens": 64}


@pytest.mark.parametrize(("name", "value", "given", "allowed"), UNREADABLE)
def test_a_value_that_cannot_be_read_is_named_and_counted(
    read: Read, name: str, value: Any, given: dict[str, Any], allowed: str
) -> None:
    assert read(**{PARAMS: {name: value}}) == given
    (said,) = read.said()
    assert f"{PARAMS}.{name} is " in said
    assert allowed in said
    assert read.counters.data["flexkv_unread_request_fields_total"] == {"value": 1}


@pytest.mark.parametrize("name", ["flexkv.ttl", "flexkv.", "flexkv.skip-save", "flexkv.blends"])
def test_a_name_that_is_not_built_is_named_with_those_that_are(read: Read, name: str) -> None:
    assert read(**{name: 5}) == {}
    (said,) = read.said()
    assert all(own in said for own in OWN_NAMES)


def test_a_request_for_blending_is_counted_where_blending_is_off(make_engine: Make) -> None:
    made = make_engine()
    made.run(make_request(PROMPT, "one", extra_args={"flexkv.blend": True}))
    assert made.counters.data["flexkv_blend_requests_total"] == {"off": 1}


def test_of_two_values_the_one_that_allows_less_holds(read: Read) -> None:
    assert read(**{PARAMS: {"flexkv.ttl_s": 60}}, **{"flexkv.ttl_s": 30}) == {"ttl_s": 30}
    both = {"max_offload_tokens": 64, "flexkv.skip_save": True, "flexkv.tiers": ["disk", "host"]}
    other = {"flexkv.max_store_tokens": 32, "flexkv.skip_save": False, "flexkv.tiers": ["disk", "remote"]}
    given = {"max_store_tokens": 32, "skip_save": True, "tiers": frozenset(("disk",))}
    assert read(**{PARAMS: both}, **other) == given
    assert (
        read(**{PARAMS: other | {"max_offload_tokens": None}}, **{"flexkv.tiers": None})["max_store_tokens"]
        == 32
    )
    assert read.said() == []
    assert read(**{PARAMS: {"flexkv.namespace": "a"}}, **{"flexkv.namespace": "b"})["skip_save"] is True


# --- stores and loads of an engine ---


def stored_blocks(engine: MiniEngine, extra: dict[str, Any] | None) -> list[int]:
    """Runs a prompt with these settings. Returns the numbers of its blocks that are stored."""
    request = make_request(PROMPT, "one", extra_args=extra)
    engine.run(request)
    return np.flatnonzero(engine.unit.manager.present(0, engine.keys_of(request))).tolist()


@pytest.mark.parametrize(
    ("most", "blocks"), [(None, WHOLE), (0, 0), (11, 2), (12, 3), (len(PROMPT) + 1, WHOLE)]
)
@pytest.mark.parametrize("mode", ["eager", "layerwise"])
def test_no_more_of_a_request_is_stored_than_it_allows(
    make_engine: Make, mode: str, most: int | None, blocks: int
) -> None:
    engine = make_engine(**{"store.mode": mode})
    assert stored_blocks(engine, {"flexkv.max_store_tokens": most}) == list(range(blocks))


def test_a_tail_behind_the_limit_is_not_stored(make_engine: Make) -> None:
    engine = make_engine(**{"store.partial_blocks": True})
    stored_blocks(engine, {"flexkv.max_store_tokens": 12})
    assert engine.stored_pages == 3
    stored_blocks(engine, None)
    assert engine.stored_pages == WHOLE + 1, "the control: the tail is stored without a limit"


@pytest.mark.parametrize(("most", "blocks"), [(None, 4), (8, 2), (0, 0)])
def test_lazy_stores_end_at_the_limit(make_engine: Make, most: int | None, blocks: int) -> None:
    engine = make_engine(blocks=8, **{"store.mode": "lazy", "store.max_reference_share": 1.0})
    request = make_request(range(100, 116), "one", extra_args={"flexkv.max_store_tokens": most})
    engine.run(request)
    engine.step({})
    engine.drain()
    assert engine.stored_pages == blocks


def after(engine: MiniEngine, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves the wall clock of the engine's manager forward by `seconds`."""
    monkeypatch.setattr(engine.unit.manager.tables, "unix_s", lambda: time.time() + seconds)


@pytest.mark.parametrize("mode", ["eager", "layerwise"])
def test_what_a_request_stores_expires(make_engine: Make, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(**{"store.mode": mode, "store.partial_blocks": True})
    extra = {"flexkv.ttl_s": 60}
    assert stored_blocks(engine, extra) == list(range(WHOLE))
    assert engine.stored_pages == WHOLE + 1
    engine.forget()
    assert engine.run(make_request([*PROMPT, 1], "two", extra_args=extra)) == len(PROMPT), "also its tail"
    engine.forget()
    after(engine, 60, monkeypatch)
    assert engine.run(make_request([*PROMPT, 1], "three")) == 0
    engine.step({})
    assert engine.counters.data["flexkv_expired_pages_total"][""] >= WHOLE + 1
    assert engine.counters.data["flexkv_missed_blocks_total"]["expired"] == (len(PROMPT) + 1) // BLOCK_TOKENS


@pytest.mark.parametrize(("ttl_s", "blocks"), [(None, 4), (60, 0)])
def test_lazy_stores_leave_out_what_would_expire(make_engine: Make, ttl_s: int | None, blocks: int) -> None:
    """Lazy stores do not store blocks of a request that has a lifetime (`flexkv.ttl_s`). The engine evicts a block long
    after it was computed, so a lazy store does not know when the block's lifetime began.
    """
    engine = make_engine(blocks=8, **{"store.mode": "lazy", "store.max_reference_share": 1.0})
    engine.run(make_request(range(100, 116), "one", extra_args={"flexkv.ttl_s": ttl_s}))
    engine.step({})
    engine.drain()
    assert engine.stored_pages == blocks


@pytest.mark.parametrize(
    ("ttls", "left"),
    [
        ((None, None), [0, 1, 2, 3]),
        ((60, None), []),
        ((60, 600), []),
        ((600, 60), [0, 1]),
        ((None, 60), [0, 1]),
    ],
)
def test_a_sessions_time_becomes_no_longer(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, ttls: tuple[int | None, ...], left: list[int]
) -> None:
    """A later piece of a session cannot extend the lifetime of the session's blocks. The session's two pieces have 10
    and 9 tokens, so one block holds tokens of each piece.
    """
    extra = [None if ttl is None else {"flexkv.ttl_s": ttl} for ttl in ttls]
    engine = make_engine()
    session = Session(engine, range(100, 110), extra[0])
    session.go_on(range(110, 119), extra[1])
    assert session.stored_blocks() == [0, 1, 2, 3]
    after(engine, 60, monkeypatch)
    keys = engine.keys_of(session.request)
    assert np.flatnonzero(engine.unit.manager.present(0, keys)).tolist() == left


@pytest.mark.parametrize(
    ("extra", "loaded"),
    [
        (None, 20),
        ({"flexkv.skip_load": True}, 0),
        ({"flexkv.max_load_tokens": 11}, 8),
        ({"flexkv.tiers": ["host"]}, 20),
    ],
)
def test_no_more_is_loaded_than_a_request_allows(
    make_engine: Make, extra: dict[str, Any] | None, loaded: int
) -> None:
    engine = make_engine()
    engine.run(make_request(PROMPT, "first"))
    engine.forget()
    assert engine.run(make_request(PROMPT, "second", extra_args=extra)) == loaded


def test_requests_with_different_namespaces_share_nothing(make_engine: Make) -> None:
    """Requests with different namespaces share no page. Two callers have a namespace each, one has none, and one has a
    namespace named "None".
    """
    engine = make_engine(**{"store.partial_blocks": True})
    names = [None, "a", "b", "None"]

    def run(name: str | None, turn: int) -> int:
        extra = None if name is None else {"flexkv.namespace": name}
        engine.forget()
        return engine.run(make_request(PROMPT, f"{name}-{turn}", extra_args=extra))

    assert [run(name, 0) for name in names] == [0] * len(names)
    assert [run(name, 1) for name in names] == [len(PROMPT) - 1] * len(names)


# --- sessions ---


@pytest.mark.parametrize(
    ("limits", "stored"),
    [
        ([None, None, None], [0, 1, 2, 3, 4, 5, 6]),
        ([{"flexkv.max_store_tokens": 12}, None, None], [0, 1, 2]),
        ([{"flexkv.max_store_tokens": 12}, {"flexkv.max_store_tokens": None}, None], [0, 1, 2, 3, 4, 5, 6]),
        ([{"flexkv.max_store_tokens": 4}, {"flexkv.max_store_tokens": 16}, None], [0, 1, 2, 3]),
        ([None, {"flexkv.max_store_tokens": 0}, None], [0, 1]),
        ([None, {"flexkv.max_store_tokens": 0}, {"flexkv.skip_load": True}], [0, 1]),
    ],
)
def test_a_session_changes_its_limit(
    make_engine: Make, limits: list[dict[str, Any] | None], stored: list[int]
) -> None:
    """A piece of a session can change the limit of stored tokens. The session's pieces have 10, 9 and 9 tokens. A piece
    without settings keeps the settings of the previous piece.
    """
    session = Session(make_engine(), range(100, 110), limits[0])
    session.go_on(range(110, 119), limits[1])
    session.go_on(range(119, 128), limits[2])
    assert session.stored_blocks() == stored


def test_a_session_that_lost_its_blocks_is_looked_up_with_its_last_pieces_settings(make_engine: Make) -> None:
    engine = make_engine()
    engine.run(make_request(range(100, 119), "before"))
    engine.forget()
    session = Session(engine, range(100, 110), None)
    engine.end_load("session")
    session.go_on(range(110, 119), {"flexkv.max_load_tokens": 8})
    assert engine.preempt_and_resume("session") == 8


def test_a_piece_of_another_namespace_is_neither_stored_nor_loaded(
    make_engine: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flexkv"), "propagate", True)
    engine = make_engine()
    named, other = {"flexkv.namespace": "a"}, {"flexkv.namespace": "b"}
    session = Session(engine, range(100, 110), named)
    session.go_on(range(110, 119), other)
    session.go_on(range(119, 128), named)
    tracker = engine.side.requests.live["session"]
    engine.finish("session")
    engine.drain()
    keys = tracker.tables[0].keys.keys()
    assert np.flatnonzero(engine.unit.manager.present(0, keys)).tolist() == [0, 1, 5, 6]
    assert not engine.unit.manager.present(0, engine.keys_of(session.request)).any()
    assert "the session's first; the piece is neither stored nor loaded" in caplog.text


def test_control_a_session_whose_pieces_are_not_read_again_keeps_its_limit(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexkv.adapters.vllm.requests.RequestTable._read_piece", lambda *_: None)
    session = Session(make_engine(), range(100, 110), {"flexkv.max_store_tokens": 12})
    session.go_on(range(110, 119), {"flexkv.max_store_tokens": None})
    assert session.stored_blocks() == [0, 1, 2]


def test_the_record_has_a_default_for_every_setting() -> None:
    assert RequestSettings() == NO_SETTINGS
    assert {setting.field for setting in NAMES.values()} == {each.name for each in fields(RequestSettings)}


NARROW_LOADS = {"skip_load", "max_load_tokens", "tiers", "blend"}
"""Settings that flexkv may ignore when it cannot read them: the request then loads more, or computes everything, but it
never stores or shares KV that it must not.
"""


def test_whoever_adds_a_setting_decides_what_an_unreadable_value_does() -> None:
    assert not set(IF_UNREADABLE) & NARROW_LOADS
    assert {field.name for field in fields(RequestSettings)} == set(IF_UNREADABLE) | NARROW_LOADS
