"""Tries each setting of a request (docs/requests.md) on a running engine with a small host memory and a disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexkv.facts.request_settings import NAMES

from .conftest import Engines, connector
from .session import BLOCK_TOKENS, EngineSession, Prompt

UNREAD = "vllm:flexkv_unread_request_fields_total"
EXPIRED = "vllm:flexkv_expired_pages_total"
ONLY_LOOK = {"flexkv.skip_save": True}
WITHIN_S = 60.0
TOKENS = 300
WHOLE = (TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
SMALL_HOST_BYTES = 8 << 20
"""Bytes of a host memory for about 58 blocks of the tiny model."""
TRIED: set[str] = set()
Ask = Callable[..., int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("settings")


@pytest.fixture
def session(engines: Engines, folder: Path) -> EngineSession:
    settings: dict[str, Any] = {"disk__compute_if_faster": False, "disk__bytes_per_folder": 64 << 20}
    return engines.get(connector(host__bytes=SMALL_HOST_BYTES, disk__folders=str(folder), **settings))


@pytest.fixture
def ask(session: EngineSession, stream: int) -> Ask:
    """Drops the engine's own cache, then sends the test's prompt with the given settings. Returns the number of cached
    tokens.
    """
    prompt = Prompt.of(TOKENS, stream)

    def run(name: str | None = None, value: object = None, **more: Any) -> int:
        session.forget()
        extra = {"kv_transfer_params": {**more, **({} if name is None else {name: value})}}
        if name is not None:
            TRIED.add(name)
        return session.check_one(replace(prompt, extra=extra)).cached

    return run


@pytest.mark.parametrize("name", ["flexkv.skip_save", "skip_save", "lmcache.skip_save"])
def test_a_request_is_not_stored(ask: Ask, name: str) -> None:
    assert ask(name, True) == 0
    assert ask(name, False) == 0, "it was stored all the same"
    assert ask() == WHOLE, "the control: it was not stored although the setting is false"


@pytest.mark.parametrize(
    "name", ["flexkv.max_store_tokens", "max_offload_tokens", "lmcache.max_offload_tokens"]
)
def test_a_request_is_stored_in_part(ask: Ask, name: str) -> None:
    assert ask(name, 3 * BLOCK_TOKENS + 5) == 0
    assert ask(name, 0) == 3 * BLOCK_TOKENS
    assert ask() == 3 * BLOCK_TOKENS
    assert ask() == WHOLE


def test_a_request_is_not_loaded(ask: Ask) -> None:
    ask()
    assert ask("flexkv.skip_load", True) == 0
    assert ask("flexkv.skip_load", False) == WHOLE


@pytest.mark.parametrize("name", ["flexkv.max_load_tokens", "max_load_tokens", "lmcache.max_tokens_per_load"])
def test_a_request_is_loaded_in_part(ask: Ask, name: str) -> None:
    ask()
    assert ask(name, 2 * BLOCK_TOKENS + 5) == 2 * BLOCK_TOKENS
    assert ask(name, 10 * TOKENS) == WHOLE


@pytest.mark.parametrize(
    ("name", "without_disk", "with_disk"),
    [
        ("flexkv.tiers", ["host", "remote"], ["disk"]),
        ("kv_load_tiers", [{"medium": "CPU"}], [{"medium": "STORAGE", "locality": "LOCAL"}]),
    ],
)
def test_only_named_tiers_are_read(
    session: EngineSession, stream: int, ask: Ask, name: str, without_disk: Any, with_disk: Any
) -> None:
    ask()
    for number in range(1, 4):
        # These prompts fill host memory, so flexkv evicts the test's prompt from it.
        session.check_one(Prompt.of(900, stream + number))
    assert ask(name, without_disk, **{"flexkv.skip_save": True}) == 0
    assert ask(name, with_disk) == WHOLE


def test_what_is_stored_for_a_while_expires(session: EngineSession, ask: Ask) -> None:
    before = session.metric(EXPIRED)
    assert ask("flexkv.ttl_s", 3600) == 0
    assert ask(**ONLY_LOOK) == WHOLE, "the control: its time is not over"
    assert ask("flexkv.ttl_s", 1, **{"flexkv.namespace": "short"}) == 0
    ends_s = time.monotonic() + WITHIN_S
    while ask(**ONLY_LOOK, **{"flexkv.namespace": "short"}):
        assert time.monotonic() < ends_s, "it is still there"
    assert ask(**ONLY_LOOK) == WHOLE
    assert session.metric(EXPIRED) - before == WHOLE // BLOCK_TOKENS


def test_namespaces_share_nothing(ask: Ask) -> None:
    names = ["tenant a", "tenant b", None]
    assert [ask("flexkv.namespace", name) for name in names] == [0, 0, 0]
    assert [ask("flexkv.namespace", name) for name in names] == [WHOLE] * 3


def test_every_name_was_tried(request: pytest.FixtureRequest) -> None:
    """Every setting in docs/requests.md was tried. This test runs after the others, which record the names that they
    try."""
    tests = [item for item in request.session.items if item.path == request.path]
    if len(tests) > 10:
        assert NAMES.keys() - TRIED == {"flexkv.blend"}, "test_blend.py tries it"


def test_what_cannot_be_read_ends_no_engine(session: EngineSession, ask: Ask) -> None:
    before = session.metric(UNREAD)
    bad: dict[str, Any] = {name: 3.5 for name in NAMES if not name.endswith("skip_save")}
    assert ask("flexkv.ttl", 3, **bad) == 0
    assert session.metric(UNREAD) - before == len(bad) + 1
    assert ask("flexkv.skip_save", "maybe") == 0, (
        "a namespace that cannot be read keeps a request out of the cache"
    )
    assert ask() == 0, "and so does a word for not storing it"
    assert ask() == WHOLE, "the control: it is stored without"


@pytest.mark.parametrize(
    ("first", "second", "blocks"),
    [
        ({}, {}, 8),
        ({"flexkv.max_store_tokens": 2 * BLOCK_TOKENS}, {}, 2),
        ({"flexkv.max_store_tokens": 2 * BLOCK_TOKENS}, {"flexkv.max_store_tokens": 6 * BLOCK_TOKENS}, 6),
        ({"flexkv.max_store_tokens": 2 * BLOCK_TOKENS}, {"flexkv.max_store_tokens": None}, 8),
        ({}, {"flexkv.skip_save": True}, 4),
        ({}, {"flexkv.namespace": "another"}, 4),
    ],
)
def test_a_session_changes_its_settings(
    session: EngineSession, stream: int, first: dict[str, Any], second: dict[str, Any], blocks: int
) -> None:
    """The pieces of a streaming session can have different settings. The session has two pieces of four and a half
    blocks each. The first set of parameters is the control."""
    tokens = run_pieces(session, stream, first, second)
    assert session.check_one(Prompt((*tokens, 1))).cached == blocks * BLOCK_TOKENS


def run_pieces(session: EngineSession, stream: int, *extras: dict[str, Any]) -> list[int]:
    """Runs a streaming session with one piece per element of `extras`, then drops the engine's own cache. Returns the
    tokens in the session's full blocks.
    """
    session.forget()
    pieces = [Prompt.of(4 * BLOCK_TOKENS + 16, stream + n, max_tokens=1) for n in range(len(extras))]
    asked = [{**piece.wire(), "extra": extra} for piece, extra in zip(pieces, extras, strict=True)]
    tokens: list[int] = session.call("stream", pieces=asked)["tokens"]
    whole = 4 * BLOCK_TOKENS * len(extras)
    assert tokens[: whole + 16 * len(extras)] == [token for piece in pieces for token in piece.ids]
    session.forget()
    return tokens[:whole]


def test_the_time_that_a_session_asks_for_in_the_middle_ends_what_follows(
    session: EngineSession, stream: int
) -> None:
    tokens = run_pieces(session, stream, {}, {"flexkv.ttl_s": 1})
    prompt = Prompt((*tokens, 1), extra={"kv_transfer_params": ONLY_LOOK})
    ends_s = time.monotonic() + WITHIN_S
    while session.check_one(prompt).cached != 4 * BLOCK_TOKENS:
        assert time.monotonic() < ends_s, "the second piece is still there"
        session.forget()
