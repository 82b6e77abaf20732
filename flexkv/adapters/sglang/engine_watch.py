"""What SGLang's scheduler does without a call to its caches: it changes weights, releases KV memory, queues requests.
And what a request is to be called whose tokens do not say what it computes.

SGLang tells its caches of a flush, which alone says nothing about the weights, and which comes after the memory of the
pool was released. Its own registry of hooks reaches both.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakSet

from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

WEIGHTS_METHOD = "_observe_weight_load"
"""What every update of weights in place goes through before the first byte changes: disk, tensors, IPC, distributed."""

MEMORY_METHOD = "release_memory_occupation"
"""Unmaps the pool of an engine without requests, whose last stores may still be under way."""


QUEUE_METHOD = "_prefetch_kvcache"
"""Called for each request that enters the scheduler's queue, with HiCache or without."""

ENTRY_METHOD = "_add_request_to_queue"
"""Called for each request before it enters a queue, whichever, and before anything is looked up of it."""

RUN_INPUTS = f"flexkv-inputs-{os.urandom(16).hex()}"
"""Stands in the extra key of this run's requests with images or other inputs."""

OWN_EMBEDDINGS = f"flexkv-embeddings-{os.urandom(16).hex()}-"
"""Stands in the extra key of a request that brings embeddings, before random digits of that request alone. No client
can know it, and so pass for a request that has them already."""


class Watching(Protocol):
    """What wants to know of new weights."""

    def new_weights(self) -> None:
        """The weights are about to change; called by the engine's scheduler thread."""


class HoldsPool(Protocol):
    """What copies from and to the engine's pool."""

    def end_copies(self) -> None:
        """The pool's memory is about to be released; called by the engine's scheduler thread.

        Raises:
            ClosedError: a copy did not end.
        """


class Prefetches(Protocol):
    """What reads pages of a request before the scheduler asks for them."""

    def prefetch(self, tree_cache: Any, request: Any) -> None:
        """The request enters the queue; called by the engine's scheduler thread."""


_watching: WeakSet[Watching] = WeakSet()
_holding: WeakSet[HoldsPool] = WeakSet()
_prefetching: WeakSet[Prefetches] = WeakSet()
_hooked: set[tuple[str, Callable[..., None]]] = set()


def watch_weights(watching: Watching) -> bool:
    """Tells `watching` of every update of weights in this process.

    False where this SGLang has no such place: then every flush has to count as new weights.
    """
    _watching.add(watching)
    return _hook(SchedulerWeightUpdaterManager, WEIGHTS_METHOD, _tell_of_weights)


def watch_memory(holding: HoldsPool) -> bool:
    """Tells `holding` before the memory of this process's pool is released.

    False where this SGLang has no such place.
    """
    _holding.add(holding)
    return _hook(SchedulerWeightUpdaterManager, MEMORY_METHOD, _tell_of_release)


def watch_queue(prefetches: Prefetches) -> bool:
    """Tells `prefetches` of every request that enters this process's queue.

    False where this SGLang has no such place.
    """
    # Here, because a cache may be made where no scheduler is imported.
    from sglang.srt.managers.scheduler import Scheduler

    _prefetching.add(prefetches)
    return _hook(Scheduler, QUEUE_METHOD, _tell_of_request)


def watch_inputs() -> bool:
    """Gives every request with images or other inputs, from now on, an extra key that no other run's have.

    SGLang puts an image among the tokens as numbers that are made of 64 bits of its digest, or of what a client says:
    too few to tell one image from all others for good. The extra key is in SGLang's page hashes, so that the pages of
    such a request are found in this run alone. Its tree keeps such requests apart from those of text for the same
    reason. A request that brings embeddings has tokens that say nothing, and a key of its own.

    False where this SGLang has no such place.
    """
    from sglang.srt.managers.scheduler import Scheduler

    return _hook(Scheduler, ENTRY_METHOD, _name_request)


def _hook(owner: type, method: str, hook: Callable[..., None]) -> bool:
    if (method, hook) not in _hooked:
        before = getattr(owner, method, None)
        if before is None:
            return False
        HookRegistry.register(f"{owner.__module__}.{owner.__qualname__}.{method}", hook, HookType.BEFORE)
        HookRegistry.apply_hooks()
        if getattr(owner, method) is before:
            return False
        _hooked.add((method, hook))
    return True


def _tell_of_weights(*_arguments: object, **_named: object) -> None:
    for watching in list(_watching):
        watching.new_weights()


def _tell_of_release(*_arguments: object, **_named: object) -> None:
    for holding in list(_holding):
        holding.end_copies()


def name_inputs(request: Any) -> None:
    """Changes the request's extra key where its tokens do not say all that it computes. Twice is as once."""
    if getattr(request, "multimodal_inputs", None) is not None:
        _add_to_extra_key(request, RUN_INPUTS, RUN_INPUTS)
    brought = ("input_embeds", "positional_embed_overrides")
    if any(getattr(request, name, None) is not None for name in brought):
        _add_to_extra_key(request, OWN_EMBEDDINGS, OWN_EMBEDDINGS + os.urandom(16).hex())


def _add_to_extra_key(request: Any, mark: str, name: str) -> None:
    before = request.extra_key or ""
    if mark not in before:
        request.extra_key = f"{before}|{name}"


def _name_request(_scheduler: Any, request: Any, *_arguments: object, **_named: object) -> None:
    name_inputs(request)


def _tell_of_request(scheduler: Any, request: Any, *_arguments: object, **_named: object) -> None:
    # This may come before the request enters its queue, and looks it up.
    name_inputs(request)
    for prefetches in list(_prefetching):
        prefetches.prefetch(scheduler.tree_cache, request)
