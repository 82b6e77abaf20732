"""Hooks into SGLang's scheduler for actions that SGLang does not report to its caches: changing weights, releasing KV
memory, queueing requests and publishing events. One of the hooks also gives separate keys to requests whose KV does not
depend on their tokens alone.

SGLang reports a flush to its caches only after it has released the pool's memory, and does not report whether the
weights change. Therefore flexkv uses SGLang's registry of hooks.
"""

from __future__ import annotations

import os
import pkgutil
import re
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from sglang import __version__ as sglang_version
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from flexkv.errors import ConfigError

RUN_INPUTS = f"flexkv-inputs-{os.urandom(16).hex()}"
"""Text that is added, in this run, to the extra key of each request with images or other non-text inputs; see
`name_inputs`."""

OWN_EMBEDDINGS = f"flexkv-embeddings-{os.urandom(16).hex()}-"
"""Text that is added to the extra key of each request with embeddings, followed by random digits for that request. No
client can know this text, so no client can send an extra key that already contains it."""

NO_ADAPTER = "flexkv-no-adapter"
"""Text that is added to the extra key of each request without a LoRA adapter whose client sent an extra key that may
contain an adapter's id; see `name_inputs`."""

_ADAPTER_ID = re.compile("[0-9a-f]{32}")
_CHECKED = "flexkv_checked_extra_key"


class EngineListener:
    """Base class of listeners. The engine's scheduler thread calls those methods for which the listener was registered
    with `watch`. The methods of this class do nothing."""

    def new_weights(self) -> None:
        """Called when the weights are about to change."""

    def emptied(self) -> None:
        """Called when the engine has emptied its radix tree (its prefix cache). By then, no copy that stores KV of the
        tree is in flight."""

    def end_copies(self) -> None:
        """Called when the pool's memory is about to be released.

        Raises:
            ClosedError: a copy did not finish.
        """

    def enter(self, request: Any) -> None:
        """Called when a request enters any queue, before the first lookup for it."""

    def prefetch(self, tree_cache: Any, request: Any) -> None:
        """Called when a request enters the scheduler's queue."""

    def begin_insert(self, request: Any) -> None:
        """Called when the engine's radix tree begins to insert a request's KV, and again with None when it has
        finished."""

    def begin_walk(self, key: Any, of_pairs: bool) -> None:
        """Called when the engine's radix tree begins to insert a key.

        Args:
            key: the key that is inserted, a `RadixKey`.
            of_pairs: whether the tree's keys consist of pairs of tokens.
        """

    def end_walk(self) -> None:
        """Called when the radix tree has inserted the key of the last `begin_walk`. A listener that is registered for
        `begin_walk` gets both calls."""

    def add_to(self, events: list[Any]) -> list[Any]:
        """Called with the events that the engine is about to publish; returns the events that it publishes instead."""
        return events


_listeners: dict[str, WeakSet[EngineListener]] = {}
"""Registered listeners, by the name of the method that they are registered for."""
_hooked: set[str] = set()
_weights_changed = False


def weights_changed() -> bool:
    """Whether the engine's weights have changed since `watch` was first called for `new_weights`."""
    return _weights_changed


def watch(listener: EngineListener, *calls: str) -> None:
    """Registers a listener: from now on, this process's scheduler calls the listener's methods that `calls` lists.

    Raises:
        ConfigError: see `put_hook`.
    """
    for call in calls:
        for hook in (call, *_ALSO.get(call, ())):
            put_hook(hook)
        _listeners.setdefault(call, WeakSet()).add(listener)


def put_hook(call: str) -> None:
    """Installs the hook that calls the method `call` of the listeners, unless it is already installed in this process.

    Raises:
        ConfigError: this version of SGLang lacks the function to hook, or another plugin has hooked it.
    """
    if call in _hooked:
        return
    target, function, when = _HOOKS[call]
    kind, _, method = target.rpartition(".")
    # The path is resolved only here, because a cache may be made in a process that does not import the scheduler.
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
    """Changes a request's extra key if the request's KV does not depend on its tokens alone. Idempotent.

    Among the tokens, SGLang represents an image by numbers made from 64 bits of the image's digest, or from a value
    that the client chose. That is not enough to distinguish one image reliably from all others. So every request with
    images or other non-text inputs gets an extra key that no other run of the engine has. The extra key enters SGLang's
    page hashes, so the pages of such a request are found only in this run. In SGLang's radix tree, the extra key also
    separates such requests from text.

    The tokens of a request with embeddings say nothing about its content, so each such request gets its own extra key.

    SGLang represents a LoRA adapter only by its id at the end of the extra key, which otherwise is the client's text. A
    client could send an adapter's id as its extra key and no adapter, and other clients' requests with the adapter
    would get the base model's KV. So if a request without an adapter has an extra key that may contain an id, flexkv
    adds `NO_ADAPTER` to the extra key.
    """
    if not hasattr(request, _CHECKED):
        # Only the client's own text is checked, because the text that flexkv adds may look like an id.
        setattr(request, _CHECKED, True)
        if request.lora_id is None and _ADAPTER_ID.search(request.extra_key or ""):
            request.extra_key = f"{request.extra_key}|{NO_ADAPTER}"
    if getattr(request, "multimodal_inputs", None) is not None:
        add_to_extra_key(request, RUN_INPUTS, RUN_INPUTS)
    brought = ("input_embeds", "positional_embed_overrides")
    if any(getattr(request, name, None) is not None for name in brought):
        add_to_extra_key(request, OWN_EMBEDDINGS, OWN_EMBEDDINGS + os.urandom(16).hex())


def add_to_extra_key(request: Any, mark: str, name: str) -> None:
    """Appends `name` to the request's extra key, unless the key already contains `mark`."""
    before = request.extra_key or ""
    if mark not in before:
        request.extra_key = f"{before}|{name}"


# --- hooks ---

_HOOKS: dict[str, tuple[str, Callable[..., Any], HookType]] = {}
"""Name of a listener's method -> (path of SGLang's method to hook, the hook, when the hook runs)."""

_ALSO = {"new_weights": ("begin_update", "end_update")}
"""Name of a listener's method -> further entries of `_HOOKS` whose hooks call that method."""

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
@_hook("begin_update", f"{_UPDATER}.begin_weight_update", HookType.BEFORE)
@_hook("end_update", f"{_UPDATER}.end_weight_update", HookType.BEFORE)
def _tell_of_weights(*_arguments: object, **_named: object) -> None:
    """SGLang calls `_observe_weight_load` for every update of weights in place (from disk, tensors, IPC or
    distributed), before the first byte changes. Between `begin_weight_update` and `end_weight_update`, weights may also
    be written by RDMA, without a call."""
    global _weights_changed
    _weights_changed = True
    for listener in _all("new_weights"):
        listener.new_weights()


@_hook("emptied", f"{_TREE}.reset", HookType.AFTER)
def _tell_of_flush(*_arguments: object, **_named: object) -> None:
    """SGLang calls the hooked method when it flushes its cache. By then, HiCache's threads have finished storing
    pages."""
    for listener in _all("emptied"):
        listener.emptied()


@_hook("end_copies", f"{_UPDATER}.release_memory_occupation", HookType.BEFORE)
def _tell_of_release(*_arguments: object, **_named: object) -> None:
    """When SGLang calls the hooked method, the engine is idle, but copies of the pages that it stored last may still be
    in flight."""
    for listener in _all("end_copies"):
        listener.end_copies()


@_hook("enter", f"{_SCHEDULER}._add_request_to_queue", HookType.BEFORE)
def _tell_of_entry(_scheduler: Any, request: Any, *_arguments: object, **_named: object) -> None:
    """SGLang calls the hooked method for each request before the request enters any queue and is first looked up."""
    name_inputs(request)
    for listener in _all("enter"):
        listener.enter(request)


@_hook("prefetch", f"{_SCHEDULER}._prefetch_kvcache", HookType.BEFORE)
def _tell_of_request(scheduler: Any, request: Any, *_arguments: object, **_named: object) -> None:
    """SGLang calls the hooked method for each request that enters the scheduler's queue, with or without HiCache."""
    # A prefetch looks the request up, so the `enter` listeners must be called first; this hook may run before theirs.
    _tell_of_entry(scheduler, request)
    for listener in _all("prefetch"):
        listener.prefetch(scheduler.tree_cache, request)


@_hook("begin_insert", f"{_TREE}.checkpoint_into_tree", HookType.AROUND)
def _tell_of_insert(insert: Callable[..., Any], cache: Any, req: Any, *arguments: Any, **named: Any) -> Any:
    """SGLang's radix tree inserts a request's KV in the hooked method, and offloads nodes meanwhile."""
    for listener in _all("begin_insert"):
        listener.begin_insert(req)
    try:
        return insert(cache, req, *arguments, **named)
    finally:
        for listener in _all("begin_insert"):
            listener.begin_insert(None)


@_hook("begin_walk", f"{_TREE}.insert", HookType.AROUND)
def _tell_of_walk(insert: Callable[..., Any], cache: Any, params: Any, *arguments: Any, **named: Any) -> Any:
    """SGLang's radix tree inserts every key in the hooked method, and offloads nodes of the key meanwhile."""
    for listener in _all("begin_walk"):
        listener.begin_walk(params.key, cache.tree_core.is_eagle)
    try:
        return insert(cache, params, *arguments, **named)
    finally:
        for listener in _all("begin_walk"):
            listener.end_walk()


@_hook("add_to", f"{_TREE}.take_events", HookType.AROUND)
def _add_events(take: Callable[..., list[Any]], cache: Any, *arguments: Any, **named: Any) -> list[Any]:
    """SGLang's scheduler publishes the events that the hooked method returns."""
    events = take(cache, *arguments, **named)
    for listener in _all("add_to"):
        events = listener.add_to(events)
    return events
