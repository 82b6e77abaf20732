"""Blending through vLLM's API server, which runs in processes of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from .blend_world import Documents, blending_connector, start_blending
from .conftest import UNPINNED, Engines, engine_arguments
from .http_server import HttpServer
from .session import BLOCK_TOKENS, Prompt

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

RATIOS = (0.0, 0.15, 1.0)
ANSWERS = 3


def serve(model: Path, log: Path) -> HttpServer:
    engine = engine_arguments(model)
    options = [
        *("--dtype", engine["dtype"], "--max-model-len", str(engine["max_model_len"])),
        *("--block-size", str(BLOCK_TOKENS), "--seed", "0", "--enforce-eager"),
        *("--num-gpu-blocks-override", str(engine["num_gpu_blocks_override"])),
        *("--hf-overrides", json.dumps({"architectures": ["FlexKVLlamaForCausalLM"]})),
        *("--kv-transfer-config", json.dumps(blending_connector())),
    ]
    return HttpServer(model, log, options, UNPINNED)


def post(server: HttpServer, prompt: Prompt, **fields: Any) -> list[tuple[int, ...]]:
    """Sends a prompt and returns the server's answers. `fields` are added to the request's body."""
    body = {"cache_salt": prompt.salt, **(prompt.extra or {})} | fields
    return [tuple(tokens) for tokens in server.complete_with(prompt.ids, prompt.max_tokens, **body)]


def result(server: HttpServer, result: str) -> float:
    return server.metric("vllm:flexkv_blend_requests_total", result=result)


def test_a_server_blends_as_the_engine_in_this_process_does(
    engines: Engines, model: Path, tmp_path: Path, stream: int
) -> None:
    """A server blends like an engine in the test's own process. Documents that were stored one by one are reused in a
    different order. The tokens are those of an engine without a server. If a request asks for several answers, at most
    the first is blended; the others are computed in full.
    """
    session = start_blending(engines)
    documents = Documents.of(stream % 10_000_000)
    documents.store(session)
    expected = {ratio: session.ask(documents.blended(ratio))[0].tokens for ratio in RATIOS}
    full = session.reference.tokens(documents.prompt)
    assert expected[1.0] == full
    assert expected[0.0] != full, "rows are reused, and their answer is another"
    with serve(model, tmp_path / "server.log") as server:
        for segment in documents.segments:
            stored = replace(documents.blended(), ids=segment, max_tokens=1)
            post(server, stored, kv_transfer_params={"flexkv.blend": {"store": True}})
        assert result(server, "stored") == len(documents.segments)
        for number, ratio in enumerate(RATIOS):
            assert post(server, documents.blended(ratio)) == [expected[ratio]]
            assert result(server, "blended") == number + 1
        covered = sum(end - first for first, end in documents.spans)
        rows = {
            kind: server.metric("vllm:flexkv_blend_rows_total", kind=kind) for kind in ("reused", "computed")
        }
        # The three requests have the ratios 1, 0.15 and 0: all rows, 15 % of them, and none of them are computed.
        assert sum(rows.values()) == len(RATIOS) * covered
        assert rows["computed"] == covered + round(0.15 * covered)
        assert post(server, documents.blended(0.0), cache_salt=None) == [full]
        assert result(server, "salt") == 1
        # vLLM refuses several answers at a temperature of 0, so this samples with top_k 1
        likeliest = {"temperature": 1.0, "top_k": 1}
        assert post(server, documents.blended(1.0), n=ANSWERS, **likeliest) == [full] * ANSWERS
        assert result(server, "used_salt") >= ANSWERS - 1
        assert result(server, "blended") + result(server, "used_salt") == len(RATIOS) + ANSWERS
