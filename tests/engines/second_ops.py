"""Operations that create further engines in the same process, send prompts to them, shut them down, or drop them."""

from __future__ import annotations

import gc
from typing import Any

from demo import engine_child

_others: dict[str, Any] = {}


def make_other(llm: Any, name: str, engine: dict[str, Any]) -> dict[str, Any]:
    """Starts one more engine. In the result, `refused` is the error if the engine does not start, and otherwise
    empty."""
    from vllm import LLM

    try:
        _others[name] = LLM(**engine)
    except Exception as error:  # any error is a result for the test
        return {"refused": f"{type(error).__name__}: {error}"}
    return {"refused": ""}


def ask_other(llm: Any, name: str, requests: list[dict[str, Any]]) -> dict[str, Any]:
    return engine_child.generate(_others[name], requests)


def reset_other(llm: Any, name: str) -> dict[str, Any]:
    """Waits until the engine `name` has no work left, then drops its own prefix cache."""
    engine_child.drain(_others[name])
    return engine_child.reset(_others[name])


def shut_down_other(llm: Any, name: str) -> dict[str, Any]:
    _others.pop(name).llm_engine.engine_core.shutdown()
    return {}


def drop_other(llm: Any, name: str) -> dict[str, Any]:
    """Drops the last reference to the engine `name`, as `del llm` does."""
    del _others[name]
    gc.collect()
    return {}


OPERATIONS: dict[str, engine_child.Operation] = {
    "make_other": make_other,
    "ask_other": ask_other,
    "reset_other": reset_other,
    "shut_down_other": shut_down_other,
    "drop_other": drop_other,
}
