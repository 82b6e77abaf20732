"""Carries out plugins' calls on the unit's thread, one per step, and answers requests for the unit's status."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from flexkv.cache.base import HUB
from flexkv.cache.manager import LocalCacheManager
from flexkv.errors import PluginCallError
from flexkv.facts.keys import Keys
from flexkv.facts.request_settings import ALLOWED_NAMESPACE, is_namespace
from flexkv.observe import get_logger
from flexkv.plugins.server import Call, CallTaker, Connection
from flexkv.plugins.unit_socket import MOST_TOKENS

logger = get_logger(__name__)

MOST_WAITING = 64
"""Maximum number of calls that wait for the unit's thread. This is twice the number of connections that the server
accepts.
"""

STATUS_EVERY_S = 1.0
"""Seconds between two copies of the unit's status. The unit's thread makes the copies, and the server's thread answers
from the last copy.
"""

PIN_SHARE = 8
"""All plugins together may pin at most 1 / `PIN_SHARE` of the host slots. The rest is left to requests."""

MOST_PIN_S = 3600.0

MOST_PINS = 64
"""Maximum number of calls of `pin` that hold pages at the same time."""

PromptKeys = Callable[[Sequence[int], str], Sequence[Keys]]
"""A function that makes the keys of a prompt's complete blocks, per KV group. It takes the prompt's token ids and its
cache salt (empty for none). The server's thread calls it, so it must not read data that the unit's thread changes.

Raises:
    FlexKVError: keys cannot be made for this prompt; the message says why.
"""


class HasStatus(Protocol):
    """The part of a unit that plugins' calls use."""

    manager: LocalCacheManager

    def status(self) -> dict[str, Any]:
        """The unit's state and counts as plain values."""


@dataclass(slots=True, eq=False)
class KeyedCall:
    """A plugin's call, with the keys of its prompt per KV group; no keys if the call has no prompt."""

    call: Call
    keys: Sequence[Keys]


@dataclass(slots=True, eq=False)
class Pin:
    """The pages that one call of `pin` keeps from eviction.

    Attributes:
        name: the name under which the manager keeps the pages.
        connection: the connection that made the call. The pin ends when the connection closes.
        ends_s: time on the monotonic clock at which the pin ends at the latest.
    """

    name: str
    connection: Connection
    ends_s: float


class PluginCalls(CallTaker):
    """Queues plugins' calls for the unit's thread, executes the calls there, and keeps a list of the pins that the
    calls made.

    Args:
        prompt_keys: makes the keys of a prompt. None if the adapter cannot make keys; calls about a prompt are then
            refused.
    """

    def __init__(self, unit: HasStatus, prompt_keys: PromptKeys | None) -> None:
        self._unit = unit
        self._prompt_keys = prompt_keys
        self._waiting: deque[KeyedCall] = deque()
        self._prefetches: dict[str, KeyedCall] = {}
        self._made = 0
        self._status_at_s = time.monotonic()
        self._status = unit.status()
        self._actions: dict[str, Callable[[KeyedCall], None]] = {
            "lookup": self._answer_cached,
            "prefetch": self._begin_prefetch,
            "forget": self._forget,
            "erase_namespace": self._erase,
            "pin": self._pin,
            "unpin": self._unpin,
        }
        self._pins: list[Pin] = []

    # --- the server's thread ---

    def take(self, call: Call) -> None:
        if call.name == "status":
            call.answer({**self._status, "age_s": round(time.monotonic() - self._status_at_s, 3)})
            return
        if call.name not in self._actions:
            raise PluginCallError(f"no such call; there are status, {', '.join(self._actions)}")
        if len(self._waiting) >= MOST_WAITING:
            raise PluginCallError(f"{MOST_WAITING} calls wait already; try again")
        if call.name == "unpin":
            self._waiting.append(KeyedCall(call, ()))
            return
        if call.name == "erase_namespace":
            name = call.arguments.get("namespace")
            if not is_namespace(name):
                raise PluginCallError(f"namespace={name!r:.40}; allowed is {ALLOWED_NAMESPACE}")
            self._waiting.append(KeyedCall(call, ()))
            return
        if self._prompt_keys is None:
            raise PluginCallError("this unit makes no keys of tokens")
        seconds: Any = call.arguments.get("seconds", None if call.name == "pin" else 1)
        if type(seconds) not in (int, float) or not 0 < seconds <= MOST_PIN_S:
            raise PluginCallError(f"seconds={seconds!r:.40}; allowed are numbers up to {MOST_PIN_S:g}")
        tokens, salt = call.arguments.get("tokens"), call.arguments.get("salt", "")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise PluginCallError("expected 'tokens', a list of whole numbers")
        if len(tokens) > MOST_TOKENS or not isinstance(salt, str):
            raise PluginCallError(f"{len(tokens)} tokens, salt {salt!r:.40}; allowed: {MOST_TOKENS} and text")
        self._waiting.append(KeyedCall(call, self._prompt_keys(tokens, salt)))

    # --- the unit's thread ---

    @property
    def busy(self) -> bool:
        """Whether calls wait for the next `run`, or prefetches wait for pages."""
        return bool(self._waiting or self._prefetches)

    def run(self) -> None:
        """Executes one waiting call, and answers prefetches that have finished. Costs a microsecond if there is nothing
        to do."""
        now_s = time.monotonic()
        if now_s - self._status_at_s >= STATUS_EVERY_S:
            self._status, self._status_at_s = self._unit.status(), now_s
        if self._pins:
            self._end_pins(lambda pin: now_s >= pin.ends_s or pin.connection.is_over)
        if self._waiting:
            one = self._waiting.popleft()
            if not one.call.is_over:
                self._attempt(self._actions[one.call.name], one)
        if self._prefetches:
            self._end_prefetches()

    def _attempt(self, action: Callable[[KeyedCall], None], one: KeyedCall) -> None:
        try:
            action(one)
        except Exception as error:
            # A failing call of a plugin must not raise in the engine's step.
            logger.exception("a plugin's call %r failed", one.call.name)
            one.call.answer({"error": f"{type(error).__name__}: {error}"})

    def _answer_cached(self, one: KeyedCall) -> None:
        manager, groups = self._unit.manager, []
        for group, keys in enumerate(one.keys):
            cached = manager.present(group, keys)
            missing = np.flatnonzero(~cached)
            groups.append(
                {
                    "pages": len(keys),
                    "cached": int(np.count_nonzero(cached)),
                    "leading": int(missing[0]) if len(missing) else len(keys),
                    "in_host": int(np.count_nonzero(manager.tiers[HUB].present(group, keys))),
                }
            )
        one.call.answer({"groups": groups})

    def _forget(self, one: KeyedCall) -> None:
        manager = self._unit.manager
        one.call.answer({"pages": sum(manager.forget(group, keys) for group, keys in enumerate(one.keys))})

    def _erase(self, one: KeyedCall) -> None:
        one.call.answer({"pages": self._unit.manager.erase_namespace(one.call.arguments["namespace"])})

    def _pin(self, one: KeyedCall) -> None:
        manager = self._unit.manager
        if len(self._pins) >= MOST_PINS:
            one.call.answer(
                {"error": f"{MOST_PINS} pins are held already; unpin, or wait for their time to end"}
            )
            return
        slots = sum(manager.hub.index.up_slots(owner) for owner in manager.hub.owners)
        self._made += 1
        name = f"flexkv plugin {self._made}"
        pages = manager.keep(name, one.keys, max(0, slots // PIN_SHARE - manager.kept_pages))
        if pages:
            ends_s = time.monotonic() + one.call.arguments["seconds"]
            self._pins.append(Pin(name, one.call.connection, ends_s))
        one.call.answer({"pages": pages})

    def _unpin(self, one: KeyedCall) -> None:
        before = self._unit.manager.kept_pages
        self._end_pins(lambda pin: pin.connection is one.call.connection)
        one.call.answer({"pages": before - self._unit.manager.kept_pages})

    def _end_pins(self, ends: Callable[[Pin], bool]) -> None:
        """Ends each pin for which `ends` returns true."""
        for pin in [pin for pin in self._pins if ends(pin)]:
            self._pins.remove(pin)
            self._unit.manager.end_keep(pin.name)

    def _begin_prefetch(self, one: KeyedCall) -> None:
        self._made += 1
        request_id = f"flexkv plugin {self._made}"
        if self._unit.manager.prefetch(request_id, one.keys):
            self._prefetches[request_id] = one
        else:
            self._answer_cached(one)

    def _end_prefetches(self) -> None:
        """Ends the prefetches whose pages have arrived or whose call was abandoned, and answers the calls that were not
        abandoned. The pages may be evicted from then on.
        """
        manager = self._unit.manager
        for request_id, one in list(self._prefetches.items()):
            if one.call.is_over or not manager.fetches(request_id):
                del self._prefetches[request_id]
                manager.release(request_id)
                if not one.call.is_over:
                    self._attempt(self._answer_cached, one)

    def close(self) -> None:
        """Ends all pins and prefetches, and drops the calls that still wait."""
        self._end_pins(lambda pin: True)
        while self._prefetches:
            self._unit.manager.release(self._prefetches.popitem()[0])
        self._waiting.clear()
