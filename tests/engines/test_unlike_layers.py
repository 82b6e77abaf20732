"""Real models whose layers differ. The last layers of a Gemma 3n attend to the KV of earlier layers, although vLLM
calls the connector's hooks for all layers. A Gemma 4 has heads of two sizes. In these tests vLLM puts all layers into
one KV group.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .conftest import FAULTY, POOL_BLOCKS, Engines, connector, engine_alone
from .session import BLOCK_TOKENS, EngineSession, Prompt, Reference
from .transformers_models import (
    FULL_HEAD,
    FULL_LAYERS,
    HEAD,
    KV_HEADS,
    LAYERS,
    SHARED_LAYERS,
    SLIDING_LAYERS,
    write_gemma_3n,
    write_gemma_4,
)

DAMAGED_STORE = [{"action": "corrupt", "kind": "store", "nth_op": 0}]
TOKEN_BYTES_OF_ONE = KV_HEADS * 2 * 4
"""Bytes of K and V per token and layer in float32, divided by the head size."""
MOVED, STORE = "vllm:flexkv_moved", "{direction=store}"
ASYNC: dict[str, str] = {}
LAYERWISE = {"load__mode": "layerwise", "store__mode": "layerwise"}


@dataclass(frozen=True)
class Model:
    """One family of models.

    Attributes:
        write: writes the model into a folder, and returns the folder.
        heads: sum of the head sizes of all layers that have KV.
    """

    write: Callable[[Path], Path]
    heads: int

    @property
    def block_bytes(self) -> int:
        return BLOCK_TOKENS * self.heads * TOKEN_BYTES_OF_ONE


GEMMA_3N = Model(write_gemma_3n, (LAYERS - SHARED_LAYERS) * HEAD)
GEMMA_4 = Model(write_gemma_4, SLIDING_LAYERS * HEAD + FULL_LAYERS * FULL_HEAD)
CASES = {
    "gemma 3n, async": (GEMMA_3N, ASYNC),
    "gemma 3n, sync loads, layerwise stores": (GEMMA_3N, {"load__mode": "sync", "store__mode": "layerwise"}),
    "gemma 3n, layerwise": (GEMMA_3N, LAYERWISE),
    "gemma 4, async": (GEMMA_4, ASYNC),
    "gemma 4, layerwise": (GEMMA_4, LAYERWISE),
}


@dataclass(frozen=True)
class Family:
    """A model of a family on disk, and the answers of an engine without a connector that runs this model."""

    model: Model
    folder: Path
    answers: Reference


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    folder = request.param.write(tmp_path_factory.mktemp("family") / "model")
    # Without a connector, vLLM gives sliding layers separate blocks, so this engine needs a larger pool.
    log = folder.parent / "engine.log"
    with engine_alone(folder, log, num_gpu_blocks_override=4 * POOL_BLOCKS) as alone:
        yield Family(request.param, folder, alone)


@pytest.mark.parametrize(("family", "settings"), CASES.values(), ids=CASES.keys(), indirect=["family"])
def test_layers_that_differ_are_stored_once_and_served(
    engines: Engines, family: Family, settings: dict[str, Any], stream: int
) -> None:
    """If a model's layers differ, flexkv stores each page once, and hits give the right answer. As a control, the
    engine's first store is damaged in transit, and the output of a hit on it must change."""
    ours = engines.another(
        connector(FAULTY, **settings),
        {"FAULT_RULES": json.dumps(DAMAGED_STORE)},
        model=str(family.folder),
        disable_hybrid_kv_cache_manager=True,
    )
    session = EngineSession(ours.process, family.answers)
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
    moved, pages = (session.metric(f"{MOVED}_{unit}_total{STORE}") for unit in ("bytes", "pages"))
    assert moved == pages * family.model.block_bytes, "not of the layers alone that have KV"
    turn = prompt.then(Prompt.of(100, stream + 2).ids)
    session.forget(seed=3)
    assert session.check_one(turn).cached >= prompt.whole_blocks
