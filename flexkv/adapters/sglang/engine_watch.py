"""Watches what SGLang's scheduler does without a call to its caches: it changes weights, releases KV memory, queues
requests and publishes events. Also gives a key of their own to requests whose tokens do not say all that they compute.

SGLang calls its caches for a flush, but a flush alone says nothing about the weights, and comes after the pool's memory
was released. SGLang's own registry of hooks reaches all of this.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakSet

from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

WEIGHTS_METHOD = "_observe_weight_load"
"""Every update of weights in place (from disk, tensors, IPC, distributed) calls this before the first byte changes."""

MEMORY_METHOD = "release_memory_occupation"
"""Unmaps the pool of an idle engine, whose last stores may still be under way."""


QUEUE_METHOD = "_prefetch_kvcache"
"""The scheduler calls this for each request that enters its queue, with or without HiCache."""

ENTRY_METHOD = "_add_request_to_queue"
"""The scheduler calls this for each request before it enters any queue, and before any of it is looked up."""

INSERT_METHOD = "checkpoint_into_tree"
"""The tree takes a request's KV within this method, and offloads nodes there."""

WALK_METHOD = "insert"
"""Every insert of the tree, which offloads nodes of the key within it."""

EVENTS_METHOD = "take_events"
"""The scheduler publishes what this returns."""

RUN_INPUTS = f"flexkv-inputs-{os.urandom(16).hex()}"
"""Is put into the extra key of this run's requests with images or other inputs."""

OWN_EMBEDDINGS = f"flexkv-embeddings-{os.urandom(16).hex()}-"
"""Begins the extra key of a request with embeddings; random digits for that request follow. No client can know it, so
no client's own extra key can pass for one that has it already."""


class Watching(Protocol):
    """An object that must learn of new weights."""

    def new_weights(self) -> None:
        """Called by the engine's scheduler thread when the weights are about to change."""


class HoldsPool(Protocol):
    """An object that copies from and to the engine's pool."""

    def end_copies(self) -> None:
        """Called by the engine's scheduler thread when the pool's memory is about to be released.

        Raises:
            ClosedError: a copy did not end.
        """


class Prefetches(Protocol):
    """An object that reads a request's pages before the scheduler looks them up."""

    def prefetch(self, tree_cache: Any, request: Any) -> None:
        """Called by the engine's scheduler thread when the request enters the queue."""


class ReadsRequests(Protocol):
    """An object that reads what callers ask with a request."""

    def enter(self, request: Any) -> None:
        """Called by the engine's scheduler thread when the request enters a queue, before any of it is looked up."""

    def begin_insert(self, request: Any) -> None:
        """Called when the engine's tree begins to take the request's KV, and with None when it has taken it."""


class AddsEvents(Protocol):
    """An object that announces pages of its own."""

    def begin_walk(self, key: Any, of_pairs: bool) -> None:
        """Called when the engine's tree begins to insert a key.

        Args:
            of_pairs: the tree's keys are pairs of tokens.
        """

    def end_walk(self) -> None:
        """Called when the tree has inserted it."""

    def add_to(self, events: list[Any]) -> list[Any]:
        """The events that the engine publishes instead of its own."""


_watching: WeakSet[Watching] = WeakSet()
_holding: WeakSet[HoldsPool] = WeakSet()
_prefetching: WeakSet[Prefetches] = WeakSet()
_reading: WeakSet[ReadsRequests] = WeakSet()
_adding: WeakSet[AddsEvents] = WeakSet()
_hooked: set[tuple[str, Callable[..., Any]]] = set()


def watch_weights(watching: Watching) -> bool:
    """Calls `watching.new_weights` before every update of weights in this process.

    Returns:
        False where this SGLang has no such method: every flush then has to count as new weights.
    """
    _watching.add(watching)
    return _hook(SchedulerWeightUpdaterManager, WEIGHTS_METHOD, _tell_of_weights)


def watch_memory(holding: HoldsPool) -> bool:
    """Calls `holding.end_copies` before the memory of this process's pool is released.

    Returns:
        False where this SGLang has no such method.
    """
    _holding.add(holding)
    return _hook(SchedulerWeightUpdaterManager, MEMORY_METHOD, _tell_of_release)


def watch_queue(prefetches: Prefetches) -> bool:
    """Calls `prefetches.prefetch` for every request that enters this process's queue.

    Returns:
        False where this SGLang has no such method.
    """
    # Imported here, because a cache may be made in a process that imports no scheduler.
    from sglang.srt.managers.scheduler import Scheduler

    _prefetching.add(prefetches)
    return _hook(Scheduler, QUEUE_METHOD, _tell_of_request)


def watch_inputs() -> bool:
    """Gives every request with images or other inputs, from now on, an extra key that no other run has.

    SGLang represents an image among the tokens by numbers made of 64 bits of its digest, or of a client's own value.
    That is too little to tell one image from all others for good. The extra key enters SGLang's page hashes, so the
    pages of such a request are found only in this run. It also keeps such requests apart from text in SGLang's tree.
    The tokens of a request that brings embeddings say nothing, so it gets an extra key that no other request has.

    Returns:
        False where this SGLang has no such method.
    """
    from sglang.srt.managers.scheduler import Scheduler

    return _hook(Scheduler, ENTRY_METHOD, _name_request)


def watch_requests(reads: ReadsRequests) -> bool:
    """Calls `reads.enter` for every request of this process, and `reads.begin_insert` around every insert of one.

    Returns:
        False where this SGLang has not both methods.
    """
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    _reading.add(reads)
    # One hook does both at the entry: SGLang applies no further hook to a method that has one.
    return watch_inputs() and _hook(UnifiedRadixCache, INSERT_METHOD, _tell_of_insert, HookType.AROUND)


def watch_events(adds: AddsEvents) -> bool:
    """Calls `adds.begin_walk` and `adds.end_walk` around every insert of this process's tree, and has the engine
    publish what `adds.add_to` returns.

    Returns:
        False where this SGLang has not both methods.
    """
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    _adding.add(adds)
    return _hook(UnifiedRadixCache, WALK_METHOD, _tell_of_walk, HookType.AROUND) and _hook(
        UnifiedRadixCache, EVENTS_METHOD, _add_events, HookType.AROUND
    )


def _hook(owner: type, method: str, hook: Callable[..., Any], when: HookType = HookType.BEFORE) -> bool:
    if (method, hook) not in _hooked:
        before = getattr(owner, method, None)
        if before is None:
            return False
        HookRegistry.register(f"{owner.__module__}.{owner.__qualname__}.{method}", hook, when)
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
    """Changes the request's extra key where its tokens do not say all that it computes. Idempotent."""
    if getattr(request, "multimodal_inputs", None) is not None:
        add_to_extra_key(request, RUN_INPUTS, RUN_INPUTS)
    brought = ("input_embeds", "positional_embed_overrides")
    if any(getattr(request, name, None) is not None for name in brought):
        add_to_extra_key(request, OWN_EMBEDDINGS, OWN_EMBEDDINGS + os.urandom(16).hex())


def add_to_extra_key(request: Any, mark: str, name: str) -> None:
    """Adds a name to the request's extra key, unless the key has the mark already."""
    before = request.extra_key or ""
    if mark not in before:
        request.extra_key = f"{before}|{name}"


def _name_request(_scheduler: Any, request: Any, *_arguments: object, **_named: object) -> None:
    name_inputs(request)
    for reads in list(_reading):
        reads.enter(request)


def _tell_of_insert(insert: Callable[..., Any], cache: Any, req: Any, *arguments: Any, **named: Any) -> Any:
    for reads in list(_reading):
        reads.begin_insert(req)
    try:
        return insert(cache, req, *arguments, **named)
    finally:
        for reads in list(_reading):
            reads.begin_insert(None)


def _tell_of_walk(insert: Callable[..., Any], cache: Any, params: Any, *arguments: Any, **named: Any) -> Any:
    for adds in list(_adding):
        adds.begin_walk(params.key, cache.tree_core.is_eagle)
    try:
        return insert(cache, params, *arguments, **named)
    finally:
        for adds in list(_adding):
            adds.end_walk()


def _add_events(take: Callable[..., list[Any]], cache: Any, *arguments: Any, **named: Any) -> list[Any]:
    events = take(cache, *arguments, **named)
    for adds in list(_adding):
        events = adds.add_to(events)
    return events


def _tell_of_request(scheduler: Any, request: Any, *_arguments: object, **_named: object) -> None:
    # This hook may run before that of ENTRY_METHOD, and a prefetch looks the request up.
    _name_request(scheduler, request)
    for prefetches in list(_prefetching):
        prefetches.prefetch(scheduler.tree_cache, request)
