"""Runs functions in vLLM's workers without flexkv's knowledge. vLLM's usual call for this, `collective_rpc`, makes
flexkv reset its cache, because the function may change weights. vLLM's core must be in this process (`IN_PROCESS`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def call_workers(llm: Any, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Runs `function(worker, *args)` in each worker. Returns the workers' answers, by rank."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    answers: list[Any] = executor.collective_rpc(function, args=args)
    return answers
