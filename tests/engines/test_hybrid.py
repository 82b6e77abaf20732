"""A real model with several KV groups: a Gemma 3 with five sliding layers to a full one, which vLLM serves as six
groups of one layer each. A hit needs all pages of the full group, and of the others those of the last window."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from demo.engine_process import IN_PROCESS, EngineError, EngineProcess
from demo.hybrid import WINDOW, write_gemma_3

from .conftest import HOST_BYTES, POOL_BLOCKS, UNPINNED, Engines, connector, engine_arguments
from .session import BLOCK_TOKENS, EngineSession, Prompt, Reference
from .test_disk import start as start_on_disk
from .test_disk import wait_durable
from .test_failures import FAULTY
from .test_parallel import TWO_RANKS
from .transformers_models import write_gemma_3n, write_gemma_4

GROUPS = 6
BLOCKS = GROUPS * POOL_BLOCKS
"""Each group takes blocks of its own."""
WINDOW_PAGES = -(-(WINDOW - 1) // BLOCK_TOKENS)
CHECKPOINT = 8 * BLOCK_TOKENS
STORED = "vllm:flexkv_moved_pages_total{direction=store}"
FAILED = "vllm:flexkv_failed_pages_total{direction=load,reason=failed}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma_3(tmp_path_factory.mktemp("gemma") / "model")


@pytest.fixture(scope="module")
def answers(folder: Path) -> Iterator[Reference]:
    arguments = engine_arguments(folder) | {"enable_prefix_caching": False, "num_gpu_blocks_override": BLOCKS}
    log = folder.parent / "engine.log"
    with EngineProcess(arguments, log, environment={**IN_PROCESS, **UNPINNED}) as process:
        yield Reference(process)


@pytest.fixture
def hybrid(engines: Engines, folder: Path, answers: Reference) -> Any:
    """Starts an engine with this model."""

    def start(rules: Sequence[Any] | None = None, **settings: Any) -> EngineSession:
        more: dict[str, Any] = {"model": str(folder), "num_gpu_blocks_override": BLOCKS}
        if rules is None:
            session = engines.get(connector(**settings), **more)
        else:
            environment = {"FAULT_RULES": json.dumps(rules)}
            session = engines.get(connector(FAULTY, **settings), environment, **more)
        return EngineSession(session.process, answers)

    return start


def test_a_hit_equals_cold(hybrid: Any, stream: int) -> None:
    session = hybrid()
    prompt = Prompt.of(405, stream)
    session.check_one(prompt)
    session.settle()
    assert session.metric(STORED) < GROUPS * prompt.whole_blocks // BLOCK_TOKENS, "windows were stored whole"
    session.forget()
    assert session.check_one(prompt).cached == prompt.whole_blocks
    session.forget(seed=2)
    turn = Prompt((*prompt.ids, *session.reference.tokens(prompt), *Prompt.of(80, stream + 1).ids))
    assert session.check_one(turn).cached >= prompt.whole_blocks
    session.forget(seed=3)
    branch = prompt.then(Prompt.of(300, stream + 2).ids)
    assert session.check_one(branch).cached >= prompt.whole_blocks


def test_bytes_stored_are_those_of_the_full_group_and_of_windows(hybrid: Any, stream: int) -> None:
    session = hybrid(store__tokens="prompt")
    before = session.metric(STORED)
    prompt = Prompt.of(2000, stream, max_tokens=1)
    session.check_one(prompt)
    session.settle()
    pages = prompt.whole_blocks // BLOCK_TOKENS
    assert session.metric(STORED) - before == pages + (GROUPS - 1) * WINDOW_PAGES


def test_a_long_prompt_is_hit_as_far_as_a_boundary(hybrid: Any, stream: int) -> None:
    """Two prompts share a beginning that ends at no boundary of theirs: the last checkpoint before it serves."""
    session = hybrid(store__checkpoint_tokens=CHECKPOINT)
    prompt = Prompt.of(700, stream)
    session.check_one(prompt)
    session.forget()
    sibling = prompt.first(500).then(Prompt.of(200, stream + 1).ids)
    assert session.check_one(sibling).cached == 500 // CHECKPOINT * CHECKPOINT


def test_control_every_group_is_needed(hybrid: Any, stream: int) -> None:
    """Of each load another group's pages are damaged on their way to the engine, and nobody looks: the answers are
    others."""
    session = hybrid([{"action": "corrupt", "kind": "load", "nth_op": GROUPS * g + g} for g in range(GROUPS)])
    prompt = Prompt.of(405, stream)
    session.check_one(prompt)
    for group in range(GROUPS):
        session.forget(seed=group)
        [answer] = session.ask(prompt)
        assert answer.cached == prompt.whole_blocks
        assert answer.tokens != session.reference.tokens(prompt), f"group {group} is of no use"
    session.forget()
    assert session.check_one(prompt).cached == prompt.whole_blocks


@pytest.mark.parametrize("group", [0, GROUPS - 1])
def test_a_page_of_a_group_fails_and_the_next_shorter_boundary_serves(
    hybrid: Any, stream: int, group: int
) -> None:
    rules = [{"action": "fail", "kind": "load", "nth_op": group, "page": 1}]
    session = hybrid(rules, store__checkpoint_tokens=CHECKPOINT)
    prompt = Prompt.of(700, stream)
    session.check_one(prompt)
    session.forget()
    answer = session.check_one(prompt)
    assert session.metric(FAILED) == 1
    assert answer.cached == (0 if group == 0 else 512)
    session.forget()
    assert session.check_one(prompt).cached == prompt.whole_blocks, "what was computed again was not stored"


def test_damaged_pages_of_any_group_are_found(hybrid: Any, stream: int) -> None:
    rules = [{"action": "corrupt", "kind": "store", "nth_op": op, "corrupt_bytes": 1} for op in range(GROUPS)]
    session = hybrid(rules, host__verify=True)
    prompt = Prompt.of(600, stream)
    session.check_one(prompt)
    session.forget()
    session.check_one(prompt)
    assert session.metric(FAILED) >= 1
    session.forget()
    assert session.check_one(prompt).cached == prompt.whole_blocks


def test_pages_of_all_groups_on_disk_serve_the_next_engine(
    engines: Engines, folder: Path, answers: Reference, tmp_path: Path, stream: int
) -> None:
    """Two ranks, each with a stripe of every page."""
    more: dict[str, Any] = {"model": str(folder), "num_gpu_blocks_override": BLOCKS}
    prompt = Prompt.of(700, stream)
    for start in range(2):
        ours = start_on_disk(
            engines,
            tmp_path / "disk",
            TWO_RANKS,
            2,
            engine=more,
            host__bytes=HOST_BYTES,
            store__checkpoint_tokens=CHECKPOINT,
        )
        session = EngineSession(ours.process, answers)
        answer = session.check_one(prompt)
        assert answer.cached == (prompt.whole_blocks if start else 0)
        session.settle()
        wait_durable(session)
    sibling = prompt.first(500).then(Prompt.of(200, stream + 1).ids)
    assert session.check_one(sibling).cached == 500 // CHECKPOINT * CHECKPOINT


def test_heads_of_two_sizes_are_served(engines: Engines, tmp_path: Path, stream: int) -> None:
    """A Gemma 4. The first answer of an engine, which has nothing cached, is the one to compare with."""
    more: dict[str, Any] = {
        "model": str(write_gemma_4(tmp_path / "model")),
        "num_gpu_blocks_override": BLOCKS,
    }
    rules = [{"action": "corrupt", "kind": "load", "nth_op": 1}]
    ours = engines.another(connector(FAULTY), {"FAULT_RULES": json.dumps(rules)}, **more)
    prompt = Prompt.of(405, stream)
    [cold] = ours.ask(prompt)
    for damaged in (True, False):
        ours.forget()
        [answer] = ours.ask(prompt)
        assert answer.cached == prompt.whole_blocks
        assert (answer.tokens != cold.tokens) == damaged


def test_layers_that_share_kv_in_a_hybrid_pool_are_refused(engines: Engines, tmp_path: Path) -> None:
    """vLLM's own prefix cache gives a Gemma 3n another answer than it gave without."""
    more: dict[str, Any] = {
        "model": str(write_gemma_3n(tmp_path / "model")),
        "num_gpu_blocks_override": BLOCKS,
    }
    with pytest.raises(EngineError, match="--disable-hybrid-kv-cache-manager"):
        engines.another(connector(), **more)
    plain = engines.another(None, **more)
    prompt = Prompt.of(405, 7)
    [[cold], [hit]] = plain.ask(prompt), plain.ask(prompt)
    assert hit.cached == prompt.whole_blocks
    assert hit.tokens != cold.tokens, "vLLM has mended it: serve these models"
