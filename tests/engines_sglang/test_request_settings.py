"""Settings of single requests (docs/requests.md) in a real SGLang engine with flexkv as its external linker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.sglang_process import PAGE_TOKENS
from tests.engines_sglang.asked import whole
from tests.engines_sglang.conftest import Judge
from tests.engines_sglang.spied import Spied, wait_until_durable

Ask = Callable[..., int]
WITHIN_S = 60.0
HALF = whole("b") // PAGE_TOKENS // 2 * PAGE_TOKENS


@pytest.fixture(scope="module")
def spied(model: Path, disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spied]:
    spied = Spied(model, tmp_path_factory.mktemp("settings") / "first", disk)
    yield spied
    spied.engine.close()


@pytest.fixture
def ask(spied: Spied, judge: Judge) -> Ask:
    """Empties the engine's own cache, then sends a prompt with the given settings. Returns the number of cached
    tokens."""

    def run(name: str, **settings: Any) -> int:
        spied.forget()
        named = {key.replace("__", "."): value for key, value in settings.items()}
        answer = spied.ask_one(name, custom_params=named)
        judge(name, answer)
        return int(answer["cached"])

    return run


@pytest.mark.parametrize(("name", "prompt"), [("flexkv__skip_save", "a"), ("lmcache__skip_save", "filler 0")])
def test_a_request_is_not_stored(ask: Ask, name: str, prompt: str) -> None:
    assert ask(prompt, **{name: True}) == 0
    assert ask(prompt, **{name: False}) == 0, "it was stored all the same"
    assert ask(prompt) == whole(prompt), "the control: it was not stored although the setting is false"


def test_a_request_is_loaded_in_part_or_not_at_all(ask: Ask) -> None:
    ask("b")
    assert ask("b", flexkv__skip_load=True) == 0
    assert ask("b", flexkv__max_load_tokens=HALF) == HALF
    assert ask("b", lmcache__max_tokens_per_load=HALF + 1) == HALF
    assert ask("b", flexkv__skip_load=False) == whole("b")


def test_namespaces_share_nothing(ask: Ask) -> None:
    names = ["tenant a", "tenant b"]
    ask("b")
    assert [ask("b", flexkv__namespace=name) for name in names] == [0, 0]
    assert [ask("b", flexkv__namespace=name) for name in [*names, None]] == [whole("b")] * 3


def test_what_is_stored_for_a_while_expires(ask: Ask) -> None:
    kept, short = {"flexkv__namespace": "kept"}, {"flexkv__namespace": "short"}
    assert ask("b", flexkv__ttl_s=3600, **kept) == 0
    assert ask("b", flexkv__ttl_s=1, **short) == 0
    ends_s = time.monotonic() + WITHIN_S
    while ask("b", flexkv__skip_save=True, **short):
        assert time.monotonic() < ends_s, "it is still there"
    assert ask("b", **kept) == whole("b"), "the control: its time is not over"


def test_what_cannot_be_read_ends_no_engine_and_is_named(spied: Spied, ask: Ask) -> None:
    bad = {
        "flexkv__tiers": "disk",
        "flexkv__ttl": 3,
        "flexkv__max_store_tokens": 8,
        "flexkv__max_load_tokens": -1,
    }
    assert ask("b", **bad) == whole("b")
    assert ask("b", flexkv__namespace=7) == 0, "neither stored nor loaded"
    assert ask("filler 1", flexkv__skip_save="maybe") == 0
    assert ask("filler 1") == 0, "a word for not storing it that cannot be read keeps it from being stored"
    assert ask("filler 1") == whole("filler 1"), "the control: it is stored without"
    assert "flexkv does not know this" in (spied.folder / "engine.log").read_text()


def test_only_named_tiers_are_read(spied: Spied, model: Path, disk: Path, judge: Judge) -> None:
    """A request reads only the tiers that its settings name. The second engine uses the folder that the first one
    wrote; its host memory is empty."""
    spied.forget()
    spied.ask_one("b")
    spied.settle()
    wait_until_durable(disk)
    spied.engine.close()
    again = Spied(model, spied.folder.parent / "second", disk)
    with again.engine:
        host_alone = {"flexkv.tiers": ["host", "remote"], "flexkv.skip_save": True}
        answer = again.ask_one("b", custom_params=host_alone)
        judge("b", answer)
        assert answer["cached"] == 0
        again.forget()
        answer = again.ask_one("b", custom_params={"flexkv.tiers": ["disk"]})
        judge("b", answer)
        assert answer["cached"] == whole("b")
