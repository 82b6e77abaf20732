"""A real API server. After SIGTERM, the pages of host memory are written to disk and stay there. A reset drops the
pages in host memory and on disk.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from demo.model import prompt_tokens
from flexkv.observe import METRICS, MetricKind

from .conftest import UNPINNED, connector, engine_arguments
from .http_server import HttpServer
from .session import BLOCK_TOKENS

PROMPT, MAX_TOKENS = 20 * BLOCK_TOKENS + 5, 8
PAGES = "vllm:flexkv_disk_pages_total"
HITS = "vllm:flexkv_hit_tokens_total"
DEVELOPMENT = {"VLLM_SERVER_DEV_MODE": "1"}
"""Environment variables without which the server has no routes for resets and pauses."""
RESET_DEADLINE_S = 60.0


@pytest.fixture
def serve(model: Path, tmp_path: Path) -> Callable[[], HttpServer]:
    """Starts servers that use the same disk folder. Pages are written to it only when host memory evicts them, or when
    the server exits normally.
    """
    started = 0

    def serve_() -> HttpServer:
        nonlocal started
        started += 1
        engine = engine_arguments(model)
        settings: dict[str, Any] = {
            "disk__folders": str(tmp_path / "disk"),
            "disk__bytes_per_folder": 64 << 20,
            "disk__mode": "evict",
            "disk__compute_if_faster": False,
            "transfer__close_s": 10,
        }
        options = [
            *("--dtype", engine["dtype"], "--max-model-len", str(engine["max_model_len"])),
            *("--block-size", str(BLOCK_TOKENS), "--seed", "0", "--enforce-eager"),
            *("--num-gpu-blocks-override", str(engine["num_gpu_blocks_override"])),
            *("--shutdown-timeout", "20", "--kv-transfer-config", json.dumps(connector(**settings))),
        ]
        return HttpServer(model, tmp_path / f"server-{started}.log", options, UNPINNED | DEVELOPMENT)

    return serve_


def check_series_before_the_first_request(server: HttpServer) -> None:
    """Checks that every metric is exported before the first request. If a counter appeared only with its first
    increment, a rate over it would miss this increment.
    """
    for metric in METRICS.values():
        name = f"vllm:{metric.name}" + ("_count" if metric.kind is MetricKind.HISTOGRAM else "")
        names = [label for label, _ in metric.labels]
        for values in itertools.product(*(values for _, values in metric.labels)):
            found = server.series(name, **dict(zip(names, values, strict=True)))
            assert len(found) == 1, (name, values)
            assert metric.kind is MetricKind.GAUGE or found == [0.0]
    assert server.series("vllm:flexkv_disks") == [1.0]
    assert server.series("vllm:flexkv_host_slots")[0] > 0


def reset(server: HttpServer, path: str) -> None:
    """Resets the cache. A reset fails while a copy is in flight, so this function repeats it, as the docs advise."""
    ends_s = time.monotonic() + RESET_DEADLINE_S
    while not server.post(path)["success"]:
        assert time.monotonic() < ends_s, server.log_tail()


def hits_after(server: HttpServer, path: str, ids: list[int], expected: list[int]) -> float:
    """Calls a route of the server, or a method of the workers. Then sends a prompt and checks the answer. Returns how
    many of the prompt's tokens were hits.
    """
    before = server.metric(HITS)
    if not path.startswith("/"):
        server.post("/collective_rpc", {"method": path})
        reset(server, "/reset_prefix_cache")
    elif "reset" in path:
        reset(server, path)
    else:
        assert server.post(path) == {"status": "paused"}
        assert server.post("/resume") == {"status": "resumed"}
        reset(server, "/reset_prefix_cache")
    assert server.complete(ids, MAX_TOKENS) == expected
    return server.metric(HITS) - before


def test_pages_outlive_an_orderly_stop_and_no_reset(serve: Callable[[], HttpServer]) -> None:
    ids = prompt_tokens(PROMPT, 3)
    with serve() as server:
        check_series_before_the_first_request(server)
        expected = server.complete(ids, MAX_TOKENS)
        assert (
            server.metric(PAGES, direction="write") == 0
        )  # nothing is on disk yet, so the pages that the next server finds were written at the orderly end
        server.terminate()
    with serve() as server:
        assert server.complete(ids, MAX_TOKENS) == expected
        assert server.metric(PAGES, direction="read") == PROMPT // BLOCK_TOKENS
        whole = PROMPT // BLOCK_TOKENS * BLOCK_TOKENS
        for path, tokens in [
            ("/reset_prefix_cache", whole),  # this route drops only the engine's own cache
            ("/pause?clear_cache=false", whole),
            ("/reset_prefix_cache?reset_external=true", 0),
            # a hit, because the prompt was stored again after the previous reset
            ("/reset_prefix_cache", whole),
            ("/pause", 0),
            ("get_model_inspection", whole),
            ("reload_weights", 0),  # loads the same weights, but flexkv cannot know that they are the same
            ("/reset_prefix_cache", whole),
        ]:
            assert hits_after(server, path, ids, expected) == tokens, path
