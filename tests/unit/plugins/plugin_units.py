"""Helpers for tests of plugins with a unit that has no engine. A test stores pages in the unit, and acts as the engine
while a plugin calls the unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from flexkv.errors import PluginCallError
from flexkv.facts.keys import Keys
from flexkv.observe import Counters
from flexkv.plugins.client import connect
from flexkv.plugins.unit_socket import socket_name
from flexkv.transfer.graph import OpResult, OpStatus
from flexkv.unit.live_unit import LiveUnit
from tests.unit.plugins.plugin_folders import DEADLINE_S, wait_for

STRIPE = 4096
BLOCK_TOKENS = 4
PAGES = 6
KEYS = np.random.default_rng(0).integers(0, 256, (PAGES, 16), dtype=np.uint8)
PROMPT = list(range(BLOCK_TOKENS * PAGES))
STORED = 4
"""Number of pages of PROMPT that `store_prompt` stores."""


def keys_of(tokens: Sequence[int], salt: str) -> list[Keys]:
    if salt:
        raise PluginCallError("no salt here")
    return [KEYS[: len(tokens) // BLOCK_TOKENS]]


Build = Callable[..., LiveUnit]


def store_prompt(made: LiveUnit) -> None:
    """Stores the first STORED pages of PROMPT, and waits until they are on disk."""
    plan = made.manager.begin_store("store", 0, KEYS[:STORED], np.arange(STORED, dtype=np.int32), 0)
    assert plan.graph is not None
    (op,) = plan.graph.ops
    made.manager.complete(0, OpResult(op.op_id, OpStatus.OK, np.empty(0, np.int32), ""))
    drive(made, lambda: not made.driver.busy and made.driver.look_durable())


def drive(unit: LiveUnit, condition: Callable[[], object]) -> None:
    """Repeats what an engine's steps do for the unit, until `condition` returns True."""

    def step() -> object:
        unit.poll()
        unit.expire_if_due(Counters())
        return condition()

    wait_for(step, "the engine's steps")


class Asking:
    """Calls the unit as a plugin does, from a separate thread, while the calling thread acts as the engine."""

    def __init__(self, unit: LiveUnit) -> None:
        self._unit = unit
        self._pool = ThreadPoolExecutor(1)
        self.client = connect(socket_name(unit.unit_id), DEADLINE_S)

    def __call__(self, name: str, *arguments: Any) -> Any:
        answer: Future[Any] = self._pool.submit(getattr(self.client, name), *arguments)
        drive(self._unit, answer.done)
        return answer.result()

    def close(self) -> None:
        self.client.close()
        self._pool.shutdown()
