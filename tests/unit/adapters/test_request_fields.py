"""flexkv reads its fields in a request, or in a piece of a streaming session, strictly. A wrong field never makes the
request fail.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.request import Request

from flexkv.adapters.common.settings_reader import SettingsReader
from flexkv.adapters.vllm.request_fields import RequestFields
from flexkv.cache.stores.kept_out import NO_END, KeptOut
from flexkv.observe import Counters
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.test_pending_stores import dropped, holds_of, two_in_flight
from tests.unit.adapters.vllm_objects import BLOCK_TOKENS, make_request

Make = Callable[..., MiniEngine]
PROMPT = list(range(100, 123))
SKIP, SAVE = {"flexkv.skip_save": True}, {"flexkv.skip_save": False}


class Read:
    """Reads the fields of a request. Tests set its clock."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.now_s, self.counters, self._caplog = 0.0, Counters(), caplog
        logger = logging.getLogger("tests.fields")
        self._fields = RequestFields(SettingsReader(self.counters, logger, lambda: self.now_s))

    def __call__(self, **extra: Any) -> dict[str, Any]:
        return self._fields.given(make_request(PROMPT, "one", extra_args=extra))

    def counted(self) -> dict[str, float]:
        return dict(self.counters.data.get("flexkv_unread_request_fields_total", {}))

    def said(self) -> list[str]:
        lines = [record.getMessage() for record in self._caplog.records if record.name == "tests.fields"]
        self._caplog.clear()
        return lines


@pytest.fixture
def read(caplog: pytest.LogCaptureFixture) -> Read:
    return Read(caplog)


@pytest.mark.parametrize(
    ("value", "skip"),
    [
        *((yes, True) for yes in (True, 1, 1.0, "true", "True")),
        *((no, False) for no in (False, 0, 0.0, "false", "FALSE", None)),
    ],
)
def test_a_flag_that_can_be_read_means_what_it_says(read: Read, value: object, skip: bool) -> None:
    assert read(**{"flexkv.skip_save": value}) == {"skip_save": skip}
    assert read(kv_transfer_params={"skip_save": value}) == {"skip_save": skip}
    assert read.said() == []


@pytest.mark.parametrize("value", ["no", "", [], [1], {}, 2, -1, "0", float("nan"), 2**63])
def test_a_flag_that_cannot_be_read_is_named_and_nothing_is_stored(read: Read, value: object) -> None:
    assert read(kv_transfer_params={"skip_save": value}) == {"skip_save": True}
    (said,) = read.said()
    assert "kv_transfer_params.skip_save" in said
    assert "true, false, 1 or 0" in said
    assert read.counted() == {"value": 1}


@pytest.mark.parametrize(
    ("extra", "place", "reason"),
    [
        ({"kv_transfer_params": {"skip_saves": True}}, "kv_transfer_params.'skip_saves'", "name"),
        ({"kv_transfer_params": {3: True}}, "kv_transfer_params.3", "name"),
        ({"flexkv.skip": True}, "extra_args.'flexkv.skip'", "name"),
        ({"kv_transfer_params": "abc"}, "kv_transfer_params is 'abc'", "type"),
        ({"kv_transfer_params": [1]}, "kv_transfer_params is [1]", "type"),
    ],
)
def test_a_name_that_flexkv_does_not_know_is_named(
    read: Read, extra: dict[str, Any], place: str, reason: str
) -> None:
    assert read(**extra) == {}
    (said,) = read.said()
    assert place in said
    assert read.counted() == {reason: 1}


def test_control_fields_of_other_connectors_are_left_to_them(read: Read) -> None:
    others = {"do_remote_prefill": True, "remote_engine_id": "x", "tp_size": 2, "transfer_id": "y"}
    assert read(kv_transfer_params=others, unrelated=3) == {}
    assert read.said() == []
    assert read.counted() == {}


def test_a_storm_is_one_line_a_minute_and_all_of_it_is_counted(read: Read) -> None:
    for _ in range(50):
        read(**{"flexkv.x": "y" * 1000})
    (said,) = read.said()
    assert len(said) < 400
    read.now_s = 61.0
    read(**{"flexkv.x": 1})
    (said,) = read.said()
    assert "49 more since the last warning" in said
    assert read.counted() == {"name": 51}


def test_no_field_ends_the_engine(make_engine: Make) -> None:
    """No value in flexkv's fields raises an exception, because an exception in a hook of the scheduler would end vLLM's
    engine.
    """
    engine = make_engine()
    for number, params in enumerate(("abc", {"skip_save": "maybe"}, {"x": object()})):
        engine.run(make_request(PROMPT, f"r{number}", extra_args={"kv_transfer_params": params}))
    assert sum(engine.counters.data["flexkv_unread_request_fields_total"].values()) == 3


def test_spans_of_tokens() -> None:
    kept = KeptOut()
    assert not kept.asked
    assert kept.within(0, 100) is None
    kept.ask(False, 0, 0)
    kept.ask(True, 10, 12)
    assert kept.within(0, 10) is None
    assert kept.within(0, 11) == (10, NO_END)
    kept.ask(True, 15, 15)
    kept.ask(False, 20, 22)
    assert kept.within(21, 30) == (10, 22)
    assert kept.within(22, 1000) is None
    assert not kept.asked


class Session:
    """A streaming session. With each piece, the engine continues as vLLM's `_update_request_as_session` does."""

    def __init__(self, engine: MiniEngine, tokens: Sequence[int], extra: dict[str, Any] | None) -> None:
        self.engine = engine
        self.request: Request = make_request(tokens, "session", extra_args=extra)
        engine.add(self.request)
        engine.step()

    def go_on(self, tokens: Sequence[int], extra: dict[str, Any] | None) -> None:
        request = self.request
        request._all_token_ids.extend(tokens)
        request.prompt_token_ids.extend(tokens)
        request.update_block_hashes()
        request.num_prompt_tokens = len(request.prompt_token_ids)
        request.sampling_params = SamplingParams(max_tokens=4, extra_args=extra)
        live = self.engine.live["session"]
        more = -(-request.num_tokens // BLOCK_TOKENS) - len(live.blocks)
        live.blocks += self.engine.pool.get_new_blocks(more)
        live.scheduled = False  # vLLM sends each piece of a session to its workers as a new request
        self.engine.step()

    def stored_blocks(self) -> list[int]:
        """Ends the session. Returns the numbers of its blocks that are in the cache."""
        self.engine.finish("session")
        self.engine.drain()
        keys = self.engine.keys_of(self.request)
        return np.flatnonzero(self.engine.unit.manager.present(0, keys)).tolist()


@pytest.mark.parametrize(
    ("asks", "stored"),
    [
        ([None, None, None], [0, 1, 2, 3, 4, 5, 6]),
        ([None, SKIP, None], [0, 1]),
        ([None, SKIP, SAVE], [0, 1, 5, 6]),
        ([SKIP, None, None], []),
        ([SKIP, SAVE, None], [3, 4, 5, 6]),
        ([SKIP, SAVE, SKIP], [3]),
        ([None, None, SKIP], [0, 1, 2, 3]),
    ],
)
def test_each_piece_of_a_session_asks_for_its_own_tokens(
    make_engine: Make, asks: list[dict[str, Any] | None], stored: list[int]
) -> None:
    """The store settings of each piece of a streaming session hold for the tokens of this piece alone. The pieces have
    10, 9 and 9 tokens, so blocks 2 and 4 each hold tokens of two pieces. The first set of parameters is the control.
    """
    session = Session(make_engine(), range(100, 110), asks[0])
    session.go_on(range(110, 119), asks[1])
    session.go_on(range(119, 128), asks[2])
    assert session.stored_blocks() == stored


@pytest.mark.parametrize(
    ("asks", "tail"), [([None, None], True), ([SKIP, None], False), ([SKIP, SAVE], False)]
)
def test_a_tail_with_a_token_that_is_kept_out_is_not_stored(
    make_engine: Make, asks: list[dict[str, Any] | None], tail: bool
) -> None:
    engine = make_engine(**{"store.partial_blocks": True})
    session = Session(engine, range(100, 109), asks[0])
    session.go_on(range(109, 111), asks[1])
    stored = len(session.stored_blocks())
    assert engine.stored_pages - stored == tail


@pytest.mark.parametrize(("asks", "stored"), [([None, None], 4), ([None, SKIP], 2), ([SKIP, SAVE], 0)])
def test_lazy_stores_end_at_the_first_block_that_is_kept_out(
    make_engine: Make, asks: list[dict[str, Any] | None], stored: int
) -> None:
    engine = make_engine(blocks=8, **{"store.mode": "lazy", "store.max_reference_share": 1.0})
    session = Session(engine, range(100, 110), asks[0])
    session.go_on(range(110, 119), asks[1])
    engine.pool.cache_full_blocks(
        session.request, engine.live["session"].blocks, 2, 4, block_size=BLOCK_TOKENS, kv_cache_group_id=0
    )
    session.stored_blocks()
    engine.step({})
    engine.drain()
    assert engine.stored_pages == stored


@pytest.mark.parametrize(
    ("asks", "held", "stored"),
    [
        ([None, None, None], 5, [0, 1, 2, 3, 4, 5, 6]),
        ([None, SKIP, SAVE], 2, [0, 1, 5, 6]),
        ([SKIP, SAVE, None], 2, [3, 4, 5, 6]),
    ],
)
def test_pages_that_wait_for_room_leave_out_what_is_kept_out(
    make_engine: Make, asks: list[dict[str, Any] | None], held: int, stored: list[int]
) -> None:
    """A piece of a session may exclude its blocks from storing. These blocks are not stored later either, if the
    session's other pages have waited because of the in-flight limit. The stores of two pages begin at once, the other
    stores only after the request has ended. The first set of parameters is the control.
    """
    engine, worker = two_in_flight(make_engine)
    session = Session(engine, range(100, 110), asks[0])
    session.go_on(range(110, 119), asks[1])
    session.go_on(range(119, 128), asks[2])
    engine.finish("session")
    (hold,) = holds_of(engine)
    assert hold.pages == held
    worker.movers[0].release()
    for _ in stored:
        engine.drain()
        engine.step({})
    keys = engine.keys_of(session.request)
    assert np.flatnonzero(engine.unit.manager.present(0, keys)).tolist() == stored
    assert dropped(engine) == {}
    assert not holds_of(engine)
