"""Summarises a run in a few lines, and says which commands to try next."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from demo.conversation import Turn
from demo.engine_process import FLEXKV


def headline(turns: list[Turn], reference: list[Turn]) -> Iterator[str]:
    """Yields lines with the number of equal answers and with the factors by which flexkv shortened the time to the
    first token. These are the smallest and the median factor over the turns in which flexkv served tokens, and the
    median over all other turns, which shows flexkv's cost.
    """
    pairs = list(zip(turns, reference, strict=True))
    equal = sum(mine.answer == theirs.answer for mine, theirs in pairs)
    yield f"answers equal to those without flexkv, token for token: {equal}/{len(pairs)}"
    gains = [theirs.ttft_s / mine.ttft_s for mine, theirs in pairs if mine.served]
    if gains:
        by_phase = {phase: _gains(pairs, phase) for phase in dict.fromkeys(mine.phase for mine, _ in pairs)}
        medians = ", ".join(f"{phase} {median(found):.1f}" for phase, found in by_phase.items() if found)
        yield (
            f"time to the first token without / with flexkv, in the {len(gains)} turns in which it served tokens: "
            f"least {min(gains):.1f}, median {median(gains):.1f} (medians: {medians})"
        )
    costs = [theirs.ttft_s / mine.ttft_s for mine, theirs in pairs if not mine.served]
    if costs:
        yield (
            f"in the {len(costs)} turns in which it had none to serve: median {median(costs):.2f}; below 1 is what "
            "looking up and storing cost, above or below what else ran on this machine"
        )


def _gains(pairs: list[tuple[Turn, Turn]], phase: str) -> list[float]:
    return [theirs.ttft_s / mine.ttft_s for mine, theirs in pairs if mine.phase == phase and mine.served]


def next_steps(model: Path) -> Iterator[str]:
    """Yields commands to try next, each on its own line after a line that says what it does."""
    python = os.path.relpath(sys.executable)
    extra = {"kv_connector_extra_config": {"host.bytes": "512MiB"}}
    config = json.dumps(FLEXKV | extra, separators=(",", ":"))
    yield "this machine and its settings: what flexkv can do here"
    yield f"  {python} -m flexkv info"
    yield "this model over HTTP, on a CPU (docs/vllm.md asks it for a hit, step by step)"
    yield (
        f"  VLLM_SERVER_DEV_MODE=1 VLLM_CPU_KVCACHE_SPACE=1 {python} -m vllm.entrypoints.openai.api_server "
        f"--model {shlex.quote(str(model))} "
        "--skip-tokenizer-init --dtype float32 --max-model-len 4096 --enforce-eager --host 127.0.0.1 --port 8000 "
        f"--kv-transfer-config {shlex.quote(config)}"
    )
    yield "a model of yours: in its own environment `pip install .` here, then"
    yield f"  vllm serve MODEL --kv-transfer-config {shlex.quote(json.dumps(FLEXKV, separators=(',', ':')))}"
    yield "more measurements, and every test"
    yield "  make bench"
    yield "  make test"
