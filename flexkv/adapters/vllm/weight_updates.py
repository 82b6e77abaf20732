"""Resets the cache when a call to vLLM's workers may have changed their weights.

vLLM informs connectors of resets, but not of new weights. Every call that changes the weights of a running engine
(`update_weights`, `reload_weights`, a method of a `worker_extension_cls`, `apply_model`) reaches the workers through
`EngineCore.collective_rpc`, which runs in the process of the scheduler's side, between two steps.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any, Protocol
from weakref import WeakSet

from flexkv.observe import get_logger

logger = get_logger(__name__)

ENGINE = "vllm.v1.engine.core"
"""The module of vLLM's engine core."""

LEAVE_WEIGHTS = frozenset(
    {
        "annotate_profile",
        "checkpoint_prepare",
        "checkpoint_restore",
        "compute_weight_checksums",
        "init_weight_transfer_engine",
        "pin_lora",
        "profile",
        "release_late_interaction_query_cache",
        "remove_lora",
        "reset_encoder_cache",
        "reset_mm_cache",
        "shutdown_weight_transfer_engine",
        "synchronize_device",
        "update_max_model_len",
    }
)
"""Methods of vLLM's workers that leave the weights as they are."""

READING = ("check_", "get_", "has_", "is_", "list_", "report_", "save_", "supports_")
"""Prefixes of the names of methods and functions that only read. flexkv assumes that they leave the weights alone."""

_IS_WATCHED = "flexkv_resets_on_new_weights"


class Resettable(Protocol):
    """An object whose cache depends on the engine's weights."""

    def forget(self) -> None:
        """Permanently turns all pages stored so far into misses."""


_sides: WeakSet[Resettable] = WeakSet()


def reset_on_new_weights(side: Resettable) -> None:
    """Resets `side` after each call of this process's engines that may have changed weights, as long as `side` lives.

    A vLLM without `EngineCore.collective_rpc` cannot be watched. Its callers then have to reset the cache.
    """
    _sides.add(side)
    core = sys.modules.get(ENGINE)
    if core is not None:
        _watch_calls(core)


def may_change_weights(method: str | Callable[..., Any]) -> bool:
    """Whether a call of the workers' `method`, the name of a method or a function, may change weights."""
    if isinstance(method, str) and method in LEAVE_WEIGHTS:
        return False
    return not name_of(method).startswith(READING)


def name_of(method: str | Callable[..., Any]) -> str:
    return method if isinstance(method, str) else str(getattr(method, "__name__", type(method).__name__))


def _watch_calls(core: ModuleType) -> None:
    """Makes `EngineCore.collective_rpc` reset all sides after each call that may have changed weights. Idempotent."""
    plain = getattr(getattr(core, "EngineCore", None), "collective_rpc", None)
    if plain is None or hasattr(plain, _IS_WATCHED):
        return

    @functools.wraps(plain)
    def collective_rpc(engine: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return plain(engine, method, *args, **kwargs)
        finally:
            # A call that failed may have changed some of the weights.
            if may_change_weights(method):
                _reset_all(method)

    setattr(collective_rpc, _IS_WATCHED, True)
    core.EngineCore.collective_rpc = collective_rpc


def _reset_all(method: str | Callable[..., Any]) -> None:
    sides = list(_sides)
    if sides:
        logger.info("the workers ran %r, which may have changed weights; the cache is reset", name_of(method))
    with ExitStack() as resets:  # resets every side, even if one of them raises an error
        for side in sides:
            resets.callback(side.forget)
