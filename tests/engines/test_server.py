"""A real API server that is told to stop: what only host memory had is on disk for the next one."""

from __future__ import annotations

import itertools
import json
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


@pytest.fixture
def serve(model: Path, tmp_path: Path) -> Callable[[], HttpServer]:
    """Starts a server over one disk folder, which is written to only when host memory evicts, or at an orderly end."""
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
        return HttpServer(model, tmp_path / f"server-{started}.log", options, UNPINNED)

    return serve_


def check_series_before_the_first_request(server: HttpServer) -> None:
    """A rate over a counter that appears with its first increment misses that increment."""
    for metric in METRICS.values():
        name = f"vllm:{metric.name}" + ("_count" if metric.kind is MetricKind.HISTOGRAM else "")
        names = [label for label, _ in metric.labels]
        for values in itertools.product(*(values for _, values in metric.labels)):
            found = server.series(name, **dict(zip(names, values, strict=True)))
            assert len(found) == 1, (name, values)
            assert metric.kind is MetricKind.GAUGE or found == [0.0]
    assert server.series("vllm:flexkv_disks") == [1.0]
    assert server.series("vllm:flexkv_host_slots")[0] > 0


def test_a_server_told_to_stop_leaves_what_host_memory_had_on_disk(serve: Callable[[], HttpServer]) -> None:
    ids = prompt_tokens(PROMPT, 3)
    with serve() as server:
        check_series_before_the_first_request(server)
        expected = server.complete(ids, MAX_TOKENS)
        assert (
            server.metric(PAGES, direction="write") == 0
        )  # only an orderly end can have written what is served next
        server.terminate()
    with serve() as server:
        assert server.complete(ids, MAX_TOKENS) == expected
        assert server.metric(PAGES, direction="read") == PROMPT // BLOCK_TOKENS
