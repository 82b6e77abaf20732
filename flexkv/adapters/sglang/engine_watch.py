"""Watches what SGLang's scheduler does without calling its caches: it changes weights, releases KV memory, queues
requests and publishes events. Also gives separate keys to requests whose tokens do not determine everything that they
compute.

SGLang calls its caches for a flush, but a flush does not say whether the weights change, and comes after the pool's
memory was released. SGLang's own registry of hooks covers all of this.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from sglang import __version__ as sglang_version
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from flexkv.errors import ConfigError

RUN_INPUTS = f"flexkv-inputs-{os.urandom(16).hex()}"
"""Is put into the extra key of this run's requests with images or other inputs."""

OWN_EMBEDDINGS = f"flexkv-embeddings-{os.urandom(16).hex()}-"
"""Begins the extra key of a request with embeddings; random digits for that request follow. No client can know it, so
no client's own extra key can pass for one that has it already."""


class EngineListener:
    """Base class of listeners, whose methods the engine's scheduler thread calls if `watch` has named them. The methods
    here do nothing."""

    def new_weights(self) -> None:
        """Called when the weights are about to change."""

    def end_copies(self) -> None:
        """Called when the pool's memory is about to be released.

        Raises:
            ClosedError: a copy did not end.
        """

    def enter(self, request: Any) -> None:
        """Called when a request enters a queue, before any of it is looked up."""

    def prefetch(self, tree_cache: Any, request: Any) -> None:
        """Called when a request enters the scheduler's queue."""

    def begin_insert(self, request: Any) -> None:
        """Called when the engine's tree begins to take the request's KV, and with None when it has taken it."""

    def begin_walk(self, key: Any, of_pairs: bool) -> None:
        """Called when the engine's tree begins to insert a key.

        Args:
            of_pairs: the tree's keys are pairs of tokens.
        """

    def end_walk(self) -> None:
        """Called when the tree has inserted it. `begin_walk` stands for both in `watch`."""

    def add_to(self, events: list[Any]) -> list[Any]:
        """The events that the engine publishes instead of its own."""
        return events


_listeners: dict[str, WeakSet[EngineListener]] = {}
"""By the method that they watch."""
_hooked: set[str] = set()


def watch(listener: EngineListener, *calls: str) -> None:
    """Has this process's scheduler call these methods of the listener from now on.

    Raises:
        ConfigError: see `put_hook`.
    """
    for call in calls:
        put_hook(call)
        _listeners.setdefault(call, WeakSet()).add(listener)


def put_hook(call: str) -> None:
    """Installs the hook that calls this method of the listeners, once in each process.

    Raises:
        ConfigError: this SGLang has no function to hook for it, or another plugin has hooked it.
    """
    if call in _hooked:
        return
    target, function, when = _HOOKS[call]
    kind, _, method = target.rpartition(".")
    # Resolved only now, because a cache may be made in a process that imports no scheduler.
    owner = pkgutil.resolve_name(kind)
    before = getattr(owner, method, None)
    if before is not None:
        HookRegistry.register(target, function, when)
        HookRegistry.apply_hooks()
    if getattr(owner, method, None) is before:
        raise ConfigError(
            f"SGLang {sglang_version} has no {target}, or another plugin has hooked it: flexkv would miss its calls. "
            "docs/sglang.md names the version that flexkv works with"
        )
    _hooked.add(call)


def name_inputs(request: Any) -> None:
    """Changes the request's extra key if its tokens do not determine everything that it computes. Idempotent.

    SGLang represents an image among the tokens by numbers made from 64 bits of its digest, or from a client's own
    value. That is too little to distinguish one image reliably from all others. So every request with images or other
    inputs gets an extra key that no other run has. The extra key enters SGLang's page hashes, so the pages of such a
    request are found only in this run. It also keeps such requests apart from text in SGLang's tree. The tokens of a
    request with embeddings say nothing about its content, so it gets an extra key that no other request has.
    """
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


# --- hooks ---

_HOOKS: dict[str, tuple[str, Callable[..., Any], HookType]] = {}
"""By the method of listeners: path of a method of SGLang, the hook, and when it runs."""

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"


def _hook(call: str, target: str, when: HookType) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def note(function: Callable[..., Any]) -> Callable[..., Any]:
        _HOOKS[call] = (target, function, when)
        return function

    return note


def _all(call: str) -> list[Any]:
    return list(_listeners.get(call, ()))


@_hook("new_weights", f"{_UPDATER}._observe_weight_load", HookType.BEFORE)
def _tell_of_weights(*_arguments: object, **_named: object) -> None:
    """Every update of weights in place (from disk, tensors, IPC, distributed) comes here before the first byte
    changes."""
    for listener in _all("new_weights"):
        listener.new_weights()


@_hook("end_copies", f"{_UPDATER}.release_memory_occupation", HookType.BEFORE)
def _tell_of_release(*_arguments: object, **_named: object) -> None:
    """The engine is idle, but its last stores may still be under way."""
    for listener in _all("end_copies"):
        listener.end_copies()


@_hook("enter", f"{_SCHEDULER}._add_request_to_queue", HookType.BEFORE)
def _tell_of_entry(_scheduler: Any, request: Any, *_arguments: object, **_named: object) -> None:
    """Each request comes here before it enters any queue, and before any of it is looked up."""
    name_inputs(request)
    for listener in _all("enter"):
        listener.enter(request)


@_hook("prefetch", f"{_SCHEDULER}._prefetch_kvcache", HookType.BEFORE)
def _tell_of_request(scheduler: Any, request: Any, *_arguments: object, **_named: object) -> None:
    """Each request that enters the scheduler's queue comes here, with or without HiCache."""
    # This hook may run before that of `enter`, and a prefetch looks the request up.
    _tell_of_entry(scheduler, request)
    for listener in _all("prefetch"):
        listener.prefetch(scheduler.tree_cache, request)


@_hook("begin_insert", f"{_TREE}.checkpoint_into_tree", HookType.AROUND)
def _tell_of_insert(insert: Callable[..., Any], cache: Any, req: Any, *arguments: Any, **named: Any) -> Any:
    """The tree takes a request's KV in `insert`, and offloads nodes there."""
    for listener in _all("begin_insert"):
        listener.begin_insert(req)
    try:
        return insert(cache, req, *arguments, **named)
    finally:
        for listener in _all("begin_insert"):
            listener.begin_insert(None)


@_hook("begin_walk", f"{_TREE}.insert", HookType.AROUND)
def _tell_of_walk(insert: Callable[..., Any], cache: Any, params: Any, *arguments: Any, **named: Any) -> Any:
    """Every insert of the tree, which offloads nodes of the key within it."""
    for listener in _all("begin_walk"):
        listener.begin_walk(params.key, cache.tree_core.is_eagle)
    try:
        return insert(cache, params, *arguments, **named)
    finally:
        for listener in _all("begin_walk"):
            listener.end_walk()


@_hook("add_to", f"{_TREE}.take_events", HookType.AROUND)
def _add_events(take: Callable[..., list[Any]], cache: Any, *arguments: Any, **named: Any) -> list[Any]:
    """The scheduler publishes what this returns."""
    events = take(cache, *arguments, **named)
    for listener in _all("add_to"):
        events = listener.add_to(events)
    return events
