"""A real Gemma 3n: its last layers attend to the KV of earlier ones, and vLLM calls the hooks of all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.engine_process import IN_PROCESS, EngineProcess

from .conftest import POOL_BLOCKS, UNPINNED, Engines, connector, engine_arguments
from .session import BLOCK_TOKENS, EngineSession, Prompt, Reference
from .test_failures import FAULTY
from .transformers_models import HEAD, KV_HEADS, LAYERS, SHARED_LAYERS, write_gemma_3n

DAMAGED_STORE = [{"action": "corrupt", "kind": "store", "nth_op": 0}]
BLOCK_BYTES = BLOCK_TOKENS * (LAYERS - SHARED_LAYERS) * KV_HEADS * HEAD * 2 * 4
MOVED, STORE = "vllm:flexkv_moved", "{direction=store}"
MODES: dict[str, dict[str, str]] = {
    "async": {},
    "sync loads, layerwise stores": {"load__mode": "sync", "store__mode": "layerwise"},
    "layerwise": {"load__mode": "layerwise", "store__mode": "layerwise"},
}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma_3n(tmp_path_factory.mktemp("gemma") / "model")


@pytest.fixture(scope="module")
def answers(gemma: Path) -> Iterator[Reference]:
    # Without a connector vLLM gives sliding layers blocks of their own.
    more = {"enable_prefix_caching": False, "num_gpu_blocks_override": 4 * POOL_BLOCKS}
    arguments = engine_arguments(gemma) | more
    log = gemma.parent / "engine.log"
    with EngineProcess(arguments, log, environment={**IN_PROCESS, **UNPINNED}) as process:
        yield Reference(process)


@pytest.mark.parametrize("settings", MODES.values(), ids=MODES.keys())
def test_layers_that_share_kv_are_stored_once_and_served(
    engines: Engines, gemma: Path, answers: Reference, settings: dict[str, Any], stream: int
) -> None:
    """The engine's first store is damaged on its way: nobody can tell but by the output."""
    ours = engines.another(
        connector(FAULTY, **settings), {"FAULT_RULES": json.dumps(DAMAGED_STORE)}, model=str(gemma)
    )
    session = EngineSession(ours.process, answers)
    damaged, prompt = Prompt.of(300, stream + 1), Prompt.of(405, stream)
    session.check_one(damaged)
    session.forget()
    [answer] = session.ask(damaged)
    assert answer.cached == damaged.whole_blocks
    assert answer.tokens != session.reference.tokens(damaged), "a damaged page was not seen"
    session.forget()
    session.check_one(prompt)
    session.forget(seed=2)
    assert session.check_one(prompt).cached == prompt.whole_blocks
    bytes_of, pages = (
        session.metric(f"{MOVED}_bytes_total{STORE}"),
        session.metric(f"{MOVED}_pages_total{STORE}"),
    )
    assert bytes_of == pages * BLOCK_BYTES, "not of the layers alone that have KV"
    turn = prompt.then(Prompt.of(100, stream + 2).ids)
    session.forget(seed=3)
    assert session.check_one(turn).cached >= prompt.whole_blocks
