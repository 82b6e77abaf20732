"""Several `vllm.LLM` in one process, with VLLM_ENABLE_V1_MULTIPROCESSING=0. vLLM then keeps one worker's connector for
the whole process, so engines can only run one after the other. If a second engine starts beside a running one, flexkv
refuses the second one, and the first one continues.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from demo.engine_process import FLEXKV

from .conftest import Engines, connector, engine_arguments
from .session import Answer, EngineSession, Prompt

BUILTIN = {**FLEXKV, "kv_connector": "FlexKVConnectorV1", "kv_load_failure_policy": "fail"}
del BUILTIN["kv_connector_module_path"]
WHAT_TO_SET = "Set VLLM_ENABLE_V1_MULTIPROCESSING=1"
START_DEADLINE_S = 200.0


def arguments(model: Path, kv_transfer_config: Mapping[str, Any] | None) -> dict[str, Any]:
    told = {} if kv_transfer_config is None else {"kv_transfer_config": dict(kv_transfer_config)}
    return engine_arguments(model) | told


def make(session: EngineSession, name: str, engine: Mapping[str, Any]) -> str:
    """Starts an engine. Returns its error if it does not start, otherwise an empty string."""
    reply = session.call("make_other", name=name, engine=dict(engine), deadline_s=START_DEADLINE_S)
    return str(reply["refused"])


def check(session: EngineSession, name: str, *prompts: Prompt) -> int:
    """Sends prompts, and checks that the answers are those of the reference. Returns the number of tokens that were
    hits."""
    reply = session.call("ask_other", name=name, requests=[prompt.wire() for prompt in prompts])
    answers = [Answer.of(result) for result in reply["requests"]]
    for prompt, answer in zip(prompts, answers, strict=True):
        session.judge(prompt, answer)
    return sum(answer.cached for answer in answers)


def check_cold_and_hit(session: EngineSession, name: str, *prompts: Prompt) -> None:
    assert check(session, name, *prompts) == 0
    assert session.call("reset_other", name=name)["done"]
    assert check(session, name, *prompts) == sum(prompt.whole_blocks for prompt in prompts)


@pytest.mark.parametrize("base", [FLEXKV, BUILTIN], ids=["connector", "built-in"])
def test_a_second_engine_is_refused_and_one_after_the_other_works(
    engines: Engines, model: Path, stream: int, base: Mapping[str, Any]
) -> None:
    settings = {"load__mode": "sync"} if base is BUILTIN else {}
    told = arguments(model, connector(base, **settings)) | {"async_scheduling": False}
    session = engines.another(None)
    mine, yours = [[Prompt.of(290 + 10 * n, stream + 4 * k + n) for n in range(3)] for k in range(2)]
    # A start that fails leaves no connector in the process.
    too_small = arguments(model, connector(base, host__bytes=64, **settings)) | {"async_scheduling": False}
    assert make(session, "failed", too_small).startswith("CapacityError")
    assert make(session, "first", told) == ""
    check_cold_and_hit(session, "first", *mine)
    same_name = told["kv_transfer_config"] | {"engine_id": "one"}
    for second in (told, arguments(model, None), told | {"kv_transfer_config": same_name}):
        refusal = make(session, "second", second)
        assert refusal.startswith("ConfigError"), refusal
        assert WHAT_TO_SET in refusal
    assert session.call("reset_other", name="first")["done"]
    assert check(session, "first", *mine) == sum(prompt.whole_blocks for prompt in mine)
    session.call("drop_other", name="first")
    assert make(session, "next", told) == ""
    check_cold_and_hit(session, "next", *yours[::-1])
    session.call("shut_down_other", name="next")
    assert make(session, "last", told) == ""
    check_cold_and_hit(session, "last", *mine)


def test_an_engine_beside_one_with_another_connector_is_refused(
    engines: Engines, model: Path, stream: int, tmp_path: Path
) -> None:
    """flexkv refuses an engine that starts beside one with another connector. vLLM would pass the second engine's loads
    and stores to the connector of the first."""
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    session = engines.another(example)
    refusal = make(session, "second", arguments(model, connector()))
    assert refusal.startswith("ConfigError"), refusal
    assert WHAT_TO_SET in refusal
