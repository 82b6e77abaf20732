"""flexkv beside another connector in vLLM's MultiConnector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from demo.engine_process import FLEXKV, SEPARATE_CORE

from .blend_world import Documents, blending_connector, results
from .conftest import PACKAGE, Engines, connector
from .session import BLOCK_TOKENS, EngineSession, Prompt
from .test_failures import CARELESS

PROMISING = {
    "kv_connector": "PromisingConnector",
    "kv_connector_module_path": f"{PACKAGE}.promising_connector",
    "kv_role": "kv_both",
}
PROMISED_TOKENS = 8 * BLOCK_TOKENS


def beside(*connectors: dict[str, Any]) -> dict[str, Any]:
    """Makes a `kv_transfer_config` with several connectors. vLLM loads tokens from the first connector that finds them,
    and stores in all connectors.
    """
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


def compute_after_anothers_failed_load(session: EngineSession, stream: int) -> Prompt:
    """Runs a prompt whose first blocks the other connector promises but does not load. In the same step, the engine
    computes the rest of the prompt from the garbage in these blocks. Then it recomputes all blocks, and gives the right
    answer.
    """
    prompt = Prompt.of(400, stream)
    session.forget()  # overwrites free blocks, so that the promised blocks contain garbage
    broken = Prompt(
        prompt.ids, prompt.max_tokens, extra={"kv_transfer_params": {"promised_tokens": PROMISED_TOKENS}}
    )
    session.check_one(broken)
    session.forget()
    return prompt


def test_what_another_connectors_failed_load_led_to_is_not_published(engines: Engines, stream: int) -> None:
    session = engines.get(beside(PROMISING, connector()))
    prompt = compute_after_anothers_failed_load(session, stream)
    assert session.metric("vllm:flexkv_unpublished_pages_total") > 0, "the failure met nothing of ours"
    assert session.check_one(prompt).cached == prompt.whole_blocks, "what was computed again was not stored"


def test_control_a_careless_connector_serves_what_anothers_failed_load_led_to(
    engines: Engines, stream: int
) -> None:
    """A control: if flexkv published the blocks that were computed from garbage, a later request would get them as
    hits."""
    session = engines.get(beside(PROMISING, connector(CARELESS)), {"FAULT_RULES": "[]"})
    prompt = compute_after_anothers_failed_load(session, stream)
    [answer] = session.ask(prompt)
    assert answer.cached == prompt.whole_blocks
    assert answer.tokens != session.reference.tokens(prompt)


def test_beside_vllms_example_connector_in_processes_of_their_own(
    engines: Engines, stream: int, tmp_path: Path
) -> None:
    """Runs flexkv beside vLLM's example connector as users do, with the scheduler in a process of its own. Every
    connector's statistics are exported with the connector's name. flexkv is the first connector, so it serves the hits.
    """
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    session = engines.get(beside(connector(FLEXKV, load__mode="async"), example), SEPARATE_CORE)
    prompt = Prompt.of(400, stream)
    session.check_one(prompt)
    assert list(tmp_path.iterdir()), "the other connector stored nothing"
    hear(session, "vllm:flexkv_moved_pages_total{direction=store}", prompt.whole_blocks // BLOCK_TOKENS)
    assert session.call("reset")["done"]
    assert session.check_one(prompt).cached == prompt.whole_blocks
    hear(session, "vllm:flexkv_moved_pages_total{direction=load}", prompt.whole_blocks // BLOCK_TOKENS)


def hear(session: EngineSession, metric: str, at_least: float) -> None:
    """Sends small prompts until the metric has reached the value `at_least`. vLLM updates metrics only with the output
    of a step."""
    small = Prompt.of(5, 0, max_tokens=1, extra={"kv_transfer_params": {"skip_save": True}})
    for _ in range(200):
        session.ask(small)
        if session.metric(metric) >= at_least:
            return
    raise AssertionError(f"{metric} is {session.metric(metric)}, not {at_least}")


def blending_beside(engines: Engines) -> EngineSession:
    overrides = {"architectures": ["FlexKVLlamaForCausalLM"]}
    return engines.get(beside(PROMISING, blending_connector()), hf_overrides=overrides)


def test_a_prompt_is_blended_beside_another_connector(engines: Engines, stream: int) -> None:
    """flexkv blends a prompt even beside another connector. A ratio of 1 gives bit for bit the result of the full
    computation; a smaller ratio, the control, does not. flexkv stores no block of a blended prompt, so a later ordinary
    request is not affected.
    """
    session = blending_beside(engines)
    documents = Documents.of(stream % 10_000_000)
    documents.store(session)
    [full], [whole], [some] = (
        session.ask(prompt) for prompt in (documents.plain(), documents.blended(1.0), documents.blended(0.15))
    )
    assert results(session) == {"stored": 3, "blended": 2}
    assert (whole.tokens, whole.log_probabilities) == (full.tokens, full.log_probabilities)
    assert some.log_probabilities != full.log_probabilities
    session.settle()
    assert session.check_one(documents.plain(salt="")).cached == 0


def test_a_blended_prompt_whose_first_blocks_another_connector_fails_to_load(
    engines: Engines, stream: int
) -> None:
    """If another connector promises the first blocks of a blended prompt and does not load them, the answer is right.
    The engine discards the rows that it computed from these blocks, and blends the prompt again from its start.
    """
    session = blending_beside(engines)
    documents = Documents.of(stream % 10_000_000)
    documents.store(session)
    answers = []
    for ratio in (1.0, 0.15):
        wanted = documents.blended(ratio)
        broken = documents.blended(ratio)
        assert broken.extra is not None
        broken.extra["kv_transfer_params"]["promised_tokens"] = PROMISED_TOKENS
        before = results(session)
        [right] = session.ask(wanted)
        session.forget()  # overwrites free blocks, so that the promised blocks contain garbage
        [answer] = session.ask(broken)
        assert results(session)["blended"] - before.get("blended", 0) == 2
        assert (answer.tokens, answer.log_probabilities) == (right.tokens, right.log_probabilities)
        answers.append(answer)
    assert answers[0].log_probabilities != answers[1].log_probabilities
    assert answers[0].tokens == session.reference.tokens(documents.prompt)
