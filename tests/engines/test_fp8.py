"""KV in eight bits, either in all layers or in all but one, so that the layers of a block differ in dtype. flexkv moves
the bytes unchanged, and no engine gets hits on KV that was stored in a different dtype.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from .conftest import FAULTY, Engines, connector, engine_alone
from .session import EngineSession, Prompt, Reference
from .test_disk import start, wait_durable
from .test_hybrid import CLOSE, farthest

pytestmark = pytest.mark.skipif(
    not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()),
    reason="vLLM keeps KV in eight bits only on CPUs with AVX-512 or AMX",
)

FP8: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3"}
BUT_ONE = FP8 | {"kv_cache_dtype_skip_layers": ["0"]}
OTHER_FP8: dict[str, Any] = {"kv_cache_dtype": "fp8_e5m2"}
DAMAGED_LOAD = [{"action": "corrupt", "kind": "load", "nth_op": 1}]


@pytest.fixture(scope="module", params=[FP8, BUT_ONE], ids=["all layers", "all but one"])
def kept(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


@pytest.fixture(scope="module")
def alone(model: Path, kept: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    with engine_alone(model, tmp_path_factory.mktemp("fp8") / "engine.log", **kept) as reference:
        yield reference


def test_a_hit_equals_cold(engines: Engines, alone: Reference, kept: dict[str, Any], stream: int) -> None:
    ours = engines.another(connector(FAULTY), {"FAULT_RULES": json.dumps(DAMAGED_LOAD)}, **kept)
    session = EngineSession(ours.process, alone)
    prompt = Prompt.of(405, stream, log_probabilities=True)
    cold = session.check_one(prompt)
    session.forget()
    hit = session.check_one(prompt)
    assert (cold.cached, hit.cached) == (0, prompt.whole_blocks)
    assert farthest(hit.log_probabilities, cold.log_probabilities) < CLOSE
    session.forget(seed=2)
    [damaged] = session.ask(prompt)
    assert damaged.cached == prompt.whole_blocks
    assert damaged.tokens != cold.tokens, "control: a damaged page was not seen"


def test_no_engine_is_served_what_another_kept_in_another_type(
    engines: Engines, tmp_path: Path, stream: int
) -> None:
    """No engine gets hits on pages of another dtype, even if they have the same size. Three engines with KV of
    different dtypes use one folder on disk in turn.
    """
    folder, prompt = tmp_path / "disk", Prompt.of(405, stream)
    for kind in (FP8, OTHER_FP8, BUT_ONE):
        session = start(engines, folder, engine=kind)
        [answer] = session.ask(prompt)
        assert answer.cached == 0
        wait_durable(session)
    session = start(engines, folder, engine=FP8)
    [answer] = session.ask(prompt)
    assert answer.cached == prompt.whole_blocks, "control: nothing was on disk"
