"""Tests of the harness without flexkv: its reference engine, the effect of garbage in blocks, and its deadlines."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo.engine_process import EngineError, EngineProcess

from .conftest import Engines
from .session import Prompt


@pytest.fixture
def shared_storage(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The configuration of vLLM's example connector. This connector stores complete prompts as files, and loads them
    within a step.
    """
    folder = tmp_path_factory.getbasetemp() / "shared-storage"
    folder.mkdir(exist_ok=True)
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def test_spoiling_free_blocks_leaves_an_engine_without_connector_right(engines: Engines, stream: int) -> None:
    session = engines.get(None)
    prompt = Prompt.of(301, stream)
    assert session.check_one(prompt).cached == 0
    assert session.check_one(prompt).cached == prompt.whole_blocks
    session.forget()
    assert session.check_one(prompt).cached == 0


def test_spoiling_keeps_off_the_blocks_of_the_engines_own_cache(engines: Engines, stream: int) -> None:
    session = engines.get(None)
    prompt = Prompt.of(301, stream)
    session.check_one(prompt)
    spoiled = session.call("scribble")
    assert 0 < spoiled["blocks"] < spoiled["free"]
    assert session.check_one(prompt).cached == prompt.whole_blocks


def test_output_depends_on_the_cached_bytes(engines: Engines, stream: int) -> None:
    """A control for every comparison with the reference: if a block that is a hit has wrong KV, the tokens change."""
    session = engines.get(None)
    prompt = Prompt.of(301, stream)
    session.forget()
    session.check_one(prompt)
    session.call("spoil_cached", blocks=1)
    [answer] = session.ask(prompt)
    assert answer.cached == prompt.whole_blocks
    assert answer.tokens != session.reference.tokens(prompt)
    session.forget()


def test_an_external_hit_is_seen_and_survives_spoiling(
    engines: Engines, shared_storage: dict[str, object], stream: int
) -> None:
    session = engines.get(shared_storage)
    prompt = Prompt.of(301, stream)
    assert session.check_one(prompt).cached == 0
    session.forget()
    assert session.check_one(prompt).cached == prompt.whole_blocks
    assert session.metric("vllm:external_prefix_cache_hits_total") == prompt.whole_blocks


def test_forget_deals_other_block_ids(engines: Engines) -> None:
    session = engines.get(None)
    session.forget()
    first = session.call("shuffle", seed=3)["first"]
    assert first != session.call("shuffle", seed=4)["first"]


def test_an_abort_ends_one_request_and_leaves_the_others(engines: Engines, stream: int) -> None:
    session = engines.get(None)
    prompts = [Prompt.of(100, stream), Prompt.of(90, stream + 1, max_tokens=40)]
    reply = session.call("abort", requests=[prompt.wire() for prompt in prompts], victim=1, steps=5)
    assert reply["aborted"]
    assert tuple(reply["requests"][0]["tokens"]) == session.reference.tokens(prompts[0])
    assert len(reply["requests"][1]["tokens"]) < 40


def test_a_failing_operation_names_its_error_and_the_engine_goes_on(engines: Engines, stream: int) -> None:
    session = engines.get(None)
    with pytest.raises(EngineError, match=r"VLLMValidationError|longer than|maximum"):
        session.ask(Prompt.of(3000, stream))
    session.check_one(Prompt.of(40, stream))


def test_a_start_past_its_deadline_leaves_no_process(model: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"start: no answer within 0\.3 s"):
        EngineProcess({"model": str(model)}, tmp_path / "log", start_deadline_s=0.3)


def test_a_call_past_its_deadline_kills_the_engine(engines: Engines) -> None:
    session = engines.get(None)
    with pytest.raises(EngineError, match=r"idle: no answer within 0\.2 s"):
        session.process.call("idle", deadline_s=0.2, seconds=60)
    assert not session.process.alive
