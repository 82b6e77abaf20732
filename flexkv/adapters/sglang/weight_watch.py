"""Hears of new weights. SGLang tells its caches of a flush, which alone says nothing about the weights."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet

from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

METHOD = "_observe_weight_load"
"""What every update of weights in place goes through before the first byte changes: disk, tensors, IPC, distributed."""

TARGET = f"{SchedulerWeightUpdaterManager.__module__}.{SchedulerWeightUpdaterManager.__qualname__}.{METHOD}"


class Watching(Protocol):
    """What wants to know."""

    def new_weights(self) -> None:
        """The weights are about to change; called by the engine's scheduler thread."""


_watching: WeakSet[Watching] = WeakSet()
_hooked = False


def watch_weights(watching: Watching) -> bool:
    """Tells `watching` of every update of weights in this process, through SGLang's own registry of hooks.

    False where this SGLang has no such place: then every flush has to count as new weights.
    """
    global _hooked
    _watching.add(watching)
    if not _hooked:
        before = getattr(SchedulerWeightUpdaterManager, METHOD, None)
        if before is None:
            return False
        HookRegistry.register(TARGET, _tell, HookType.BEFORE)
        HookRegistry.apply_hooks()
        _hooked = getattr(SchedulerWeightUpdaterManager, METHOD) is not before
    return _hooked


def _tell(*_arguments: object, **_named: object) -> None:
    for watching in list(_watching):
        watching.new_weights()
