"""A real model with recurrent states: a Qwen3-Next with three layers of states and one layer of attention. vLLM serves
it as four KV groups. A hit needs all pages of the attention group and, in each other group, the state at the end of the
hit. The engine keeps a state wherever one of its steps ends at a block boundary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from demo.engine_process import IN_PROCESS, EngineError, EngineProcess

from .conftest import FAULTY, OPERATIONS, PACKAGE_ROOT, UNPINNED, Engines, connector, engine_arguments
from .session import Answer, EngineSession, Prompt, Reference
from .test_disk import DISK_READS, wait_durable
from .test_disk import start as start_on_disk
from .test_parallel import TWO_RANKS
from .transformers_models import STATE_LAYERS, write_qwen_3_next

GROUPS = STATE_LAYERS + 1
BLOCK_TOKENS = 288
"""Number of tokens per block. vLLM chooses it so that a block of attention is as large as a state."""
PART_TOKENS, PART_BLOCKS = 640, 2
"""Size of the largest part of a prompt that vLLM computes in one step: in tokens, and in full blocks."""
MOST_ASKED = 10
"""The largest number of times that a prompt is sent until all its states are stored."""
ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    # Without this setting, vLLM chooses float32 only on a CPU with AVX512-BF16, and otherwise bfloat16 and smaller
    # blocks.
    "mamba_ssm_cache_dtype": "float32",
    "num_gpu_blocks_override": 64,
    "max_num_batched_tokens": PART_TOKENS,
}
DAMAGED_LOADS = [
    *({"action": "corrupt", "kind": "load", "nth_op": GROUPS * g + g} for g in range(GROUPS)),
    {"action": "delay", "kind": "store", "delay_s": 0.01},
]
"""Fault rules. In each load they damage the pages of a different KV group. They also make stores slow."""
LATE = FAULTY | {"kv_connector": "LateConnector"}
TALKATIVE = FAULTY | {"kv_connector": "TalkativeConnector"}
CHECKPOINT = {"store__checkpoint_tokens": PART_BLOCKS * BLOCK_TOKENS}
STORED = "vllm:flexkv_moved_pages_total{direction=store}"
CANCELLED = "vllm:flexkv_cancelled_pages_total{direction=store}"
FAILED = "vllm:flexkv_failed_pages_total{direction=load,reason=failed}"
EVICTIONS = "vllm:flexkv_evictions_total"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen_3_next(tmp_path_factory.mktemp("qwen") / "model")


class Alone:
    """The reference: an engine with vLLM's own prefix cache and no connector. flexkv's answers must equal its answers.

    In bfloat16 the last bits of a state depend on the parts in which a prompt was computed, and an answer may depend on
    these bits. So a test compares a hit with a hit of the same length in vLLM's own cache. If the answers differ, it
    compares the hit with the reference's answer to the prompt alone, without a hit.
    """

    def __init__(self, process: EngineProcess) -> None:
        self._session = EngineSession(process, Reference(process))

    def answer(self, prompt: Prompt, *before: Prompt) -> Answer:
        """Drops the reference's prefix cache, sends the prompts in `before`, then `prompt`. Returns the answer to
        `prompt`.
        """
        self._session.forget()
        *_, answer = [self._session.ask(one)[0] for one in (*before, prompt)]
        return answer

    def check(self, session: EngineSession, prompt: Prompt, *before: Prompt) -> int:
        """Sends the prompt to `session`, compares the answers, and returns the length of the hit.

        Args:
            before: prompts that the reference computes first, so that it gets a hit; by default the part of `prompt`
                that was a hit in `session`.
        """
        [ours] = session.ask(prompt)
        if not before and ours.cached:
            before = (prompt.first(ours.cached + 1),)
        own = self.answer(prompt, *before)
        assert ours.cached == own.cached
        if ours.tokens != own.tokens:
            assert ours.tokens == self.answer(prompt).tokens
        return ours.cached


@pytest.fixture(scope="module")
def alone(qwen: Path) -> Iterator[Alone]:
    log = qwen.parent / "engine.log"
    every_state = {"prefix_cache_retention_interval": None}
    with EngineProcess(
        engine_arguments(qwen) | ENGINE | every_state,
        log,
        OPERATIONS,
        {**IN_PROCESS, **UNPINNED},
        [PACKAGE_ROOT],
    ) as process:
        yield Alone(process)


@pytest.fixture
def states(engines: Engines, qwen: Path) -> Callable[..., EngineSession]:
    """Starts engines with a model that has states."""

    def start(
        rules: Sequence[Any] | None = None,
        engine: Mapping[str, Any] | None = None,
        kind: Mapping[str, Any] = FAULTY,
        **settings: Any,
    ) -> EngineSession:
        more: dict[str, Any] = ENGINE | {"model": str(qwen)} | dict(engine or {})
        if rules is None:
            return engines.get(connector(**settings), **more)
        return engines.get(connector(kind, **settings), {"FAULT_RULES": json.dumps(rules)}, **more)

    return start


def whole(prompt: Prompt) -> int:
    """Returns the length of the longest hit that the prompt can have, in tokens."""
    return (len(prompt.ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def store_whole(session: EngineSession, alone: Alone, prompt: Prompt) -> int:
    """Sends a new prompt repeatedly until all its pages are stored. Returns their number.

    While a prompt is computed, the engine reuses the block of an earlier state of the prompt. On a busy machine, the
    copy of that state may not have ended by then. The state is then not stored.
    """
    for _ in range(MOST_ASKED):
        stored, cancelled = session.metric(STORED), session.metric(CANCELLED)
        assert alone.check(session, prompt) == 0
        session.settle()
        if session.metric(CANCELLED) == cancelled:
            return int(session.metric(STORED) - stored)
        assert session.call("reset", connector=True)["done"]
    raise AssertionError(f"each of {MOST_ASKED} times the copy of a state took longer than a step")


def test_a_hit_equals_cold(states: Any, alone: Alone, stream: int) -> None:
    session = states(**CHECKPOINT)
    prompt = Prompt.of(1000, stream)
    cold = alone.answer(prompt)
    boundaries = 2  # states are stored at the end of the first part, and at the end of the last block
    assert store_whole(session, alone, prompt) == whole(prompt) // BLOCK_TOKENS + STATE_LAYERS * boundaries
    session.forget()
    [hit] = session.ask(prompt)
    assert (hit.tokens, hit.cached) == (cold.tokens, whole(prompt))
    # The last stored state belongs to a boundary before the end of the prompt. So it also serves the next turn of the
    # conversation, and prompts that diverge after this boundary.
    session.forget(seed=2)
    turn = prompt.then((*cold.tokens, *Prompt.of(400, stream + 1).ids))
    assert alone.check(session, turn, prompt) == whole(prompt)
    session.forget(seed=3)
    assert alone.check(session, prompt.then(Prompt.of(300, stream + 2).ids), prompt) == whole(prompt)
    session.forget(seed=4)
    assert alone.check(session, turn, prompt, turn) == whole(turn)


def test_a_state_whose_copy_outlasts_its_block_is_lost(states: Any, alone: Alone, stream: int) -> None:
    """If the engine reuses a state's block before its copy has ended, the state is not stored. All copies stall while
    the prompt is computed. The states of the first part are lost; those at the last boundary are stored.
    """
    session = states([{"action": "stall", "kind": "store"}], **CHECKPOINT)
    stored, cancelled = session.metric(STORED), session.metric(CANCELLED)
    prompt = Prompt.of(1000, stream)
    session.ask(prompt)
    session.call("release")
    session.settle()
    assert session.metric(CANCELLED) - cancelled == STATE_LAYERS, "the states of the first part"
    assert session.metric(STORED) - stored == whole(prompt) // BLOCK_TOKENS + STATE_LAYERS
    session.forget()
    assert alone.check(session, prompt) == whole(prompt)


def test_states_of_an_answer_serve_the_next_turn(states: Any, alone: Alone, stream: int) -> None:
    session = states(**CHECKPOINT)
    prompt = Prompt.of(BLOCK_TOKENS - 20, stream, max_tokens=BLOCK_TOKENS + 40)
    [answer] = session.ask(prompt)
    session.forget()
    turn = Prompt((*prompt.ids, *answer.tokens, *Prompt.of(80, stream + 1).ids))
    assert alone.check(session, turn, prompt) == 2 * BLOCK_TOKENS


def test_a_state_within_a_prompt_serves_those_who_share_its_beginning(
    states: Any, alone: Alone, stream: int
) -> None:
    session = states(**CHECKPOINT)
    prompt = Prompt.of(1400, stream)
    of_prompt = whole(prompt) // BLOCK_TOKENS
    assert store_whole(session, alone, prompt) == of_prompt + STATE_LAYERS * (of_prompt // PART_BLOCKS)
    session.forget()
    sibling = prompt.first(1100).then(Prompt.of(200, stream + 1).ids)
    assert alone.check(session, sibling, prompt) == PART_BLOCKS * BLOCK_TOKENS


def test_states_that_end_within_blocks_are_not_taken_for_others(
    states: Any, alone: Alone, stream: int
) -> None:
    """flexkv does not mistake states within a block for states at a block boundary. If vLLM hashes parts of blocks, it
    also keeps states at lengths that are not block boundaries.
    """
    session = states(engine={"prefix_match_unit": 32})
    prompt = Prompt.of(1000, stream)
    [cold] = session.ask(prompt)
    session.forget()
    [hit] = session.ask(prompt)
    assert (hit.tokens, hit.cached) == (cold.tokens, whole(prompt))
    session.forget()
    turn = prompt.then((*cold.tokens, *Prompt.of(400, stream + 1).ids))
    assert alone.check(session, turn, prompt) == whole(prompt)


def test_control_every_group_is_needed(states: Any, alone: Alone, stream: int) -> None:
    """A control: every KV group is needed for a right answer. In each load the pages of a different group are damaged,
    and no digest is checked. The answer changes each time.
    """
    session = states(DAMAGED_LOADS)
    # Few tokens follow the hit, because the effect of a wrong state fades.
    prompt = Prompt.of(2 * BLOCK_TOKENS + 3, stream)
    [cold] = session.ask(prompt)
    for group in range(GROUPS):
        session.forget(seed=group)
        [answer] = session.ask(prompt)
        assert answer.cached == whole(prompt)
        assert answer.tokens != cold.tokens, f"group {group} is of no use"
    session.forget()
    assert alone.check(session, prompt) == whole(prompt)


def test_a_reset_forgets_states(states: Any, alone: Alone, stream: int) -> None:
    session = states(DAMAGED_LOADS)
    prompt = Prompt.of(1000, stream, max_tokens=1)
    session.ask(prompt)
    assert session.call("reset", connector=True)["done"]
    session.settle()
    session.call("scribble")
    assert alone.check(session, prompt) == 0
    session.forget()
    assert alone.check(session, prompt) == whole(prompt)


def test_a_page_of_a_group_fails_and_the_next_shorter_boundary_serves(
    states: Any, alone: Alone, stream: int
) -> None:
    """If a page fails to load, a hit at an earlier boundary is used where possible. A state is needed only for hits
    that end at its own boundary, so after its failure a shorter hit is possible. The attention group's first page is
    needed for every hit.
    """
    # For the first prompt there are three loads of GROUPS ops each: a load that fails, a shorter one, and a complete
    # one.
    failing = (GROUPS - 1, 3 * GROUPS)
    rules = [{"action": "fail", "kind": "load", "nth_op": op, "page": 0} for op in failing]
    session = states(rules, **CHECKPOINT)
    for number, served in enumerate((PART_BLOCKS * BLOCK_TOKENS, 0)):
        prompt = Prompt.of(1000, stream + number)
        store_whole(session, alone, prompt)
        session.forget()
        assert alone.check(session, prompt) == served
        assert session.metric(FAILED) == number + 1
        session.forget()
        assert alone.check(session, prompt) == whole(prompt), "what was computed again was not stored"


def test_control_a_load_within_the_step_comes_after_vllm_has_moved_the_state(
    states: Any, stream: int
) -> None:
    session = states([], {"async_scheduling": False}, LATE, load__mode="sync")
    prompt = Prompt.of(2 * BLOCK_TOKENS + 3, stream)
    [cold] = session.ask(prompt)
    session.forget()
    [hit] = session.ask(prompt)
    assert hit.cached == whole(prompt)
    assert hit.tokens != cold.tokens


def test_control_vllm_takes_no_blocks_of_several_groups_back(
    states: Any, engines: Engines, stream: int
) -> None:
    session = states([{"action": "fail", "kind": "load", "nth_op": 0, "page": 0}], kind=TALKATIVE)
    prompt = Prompt.of(2 * BLOCK_TOKENS + 3, stream)
    session.ask(prompt)
    session.forget()
    with pytest.raises(EngineError, match="RuntimeError"):
        session.ask(prompt)
    engines.close()


def test_evicted_states_are_missed_and_no_byte_is_wrong(states: Any, alone: Alone, stream: int) -> None:
    session = states(host__bytes=4 << 20, host__extent_bytes=2 << 20)
    prompts = [Prompt.of(700 + 130 * n, stream + n, max_tokens=4) for n in range(6)]
    cached = []
    for prompt in (*prompts, *reversed(prompts)):
        cached.append(alone.check(session, prompt))
        session.forget()
    assert session.metric(EVICTIONS) > 0
    assert cached[len(prompts)] == whole(prompts[-1]), "the last prompt was evicted"
    assert cached[-1] < whole(prompts[0]), "there was room for everything"
    session.call("exchange_pages")
    [answer] = session.ask(prompts[0])
    assert answer.cached == whole(prompts[0])
    assert answer.tokens != alone.answer(prompts[0]).tokens, "control: wrong bytes would go unnoticed"


@pytest.mark.long
def test_two_ranks_serve_states_from_disk_after_a_restart(
    engines: Engines, qwen: Path, tmp_path: Path, stream: int
) -> None:
    """Two ranks load states from disk after a restart. The first engine is killed. Each of its two ranks had stored a
    stripe of every state."""
    prompt = Prompt.of(1000, stream)
    answers = []
    for _ in range(2):
        more = ENGINE | {"model": str(qwen)}
        session = start_on_disk(engines, tmp_path / "disk", TWO_RANKS, 2, engine=more)
        answers += session.ask(prompt)
        session.settle()
        wait_durable(session)
        reads = session.metric(DISK_READS)
        session.process.kill()
    cold, hit = answers
    assert (cold.cached, hit.cached) == (0, whole(prompt))
    assert hit.tokens == cold.tokens
    assert reads == whole(prompt) // BLOCK_TOKENS + STATE_LAYERS


def test_an_engine_that_hands_no_states_over_is_refused(engines: Engines, qwen: Path) -> None:
    with pytest.raises(EngineError, match=r"mamba_cache_mode is 'none'.*--mamba-cache-mode align"):
        engines.another(connector(), **ENGINE | {"model": str(qwen), "enable_prefix_caching": False})
