"""Delays orders, so that they reach a rank later than the messages of its engine."""

from __future__ import annotations

from typing import Any

from tests.unit.tensorrt_llm.world import World


class LateOrders:
    """Replaces a rank's wire, the connection that brings the scheduler's orders. Keeps incoming orders back until the
    test releases them, like a socket that is slower than the engine's own messages. Does not change the sequence of the
    orders.
    """

    def __init__(self, world: World) -> None:
        self._wire: Any = world.worker.side._wire
        self._kept: list[Any] = []
        self._holding = False
        world.worker.side._wire = self  # type: ignore[assignment]

    def hold(self) -> None:
        self._holding = True

    def let_through(self) -> None:
        self._holding = False

    def receive(self) -> list[Any]:
        self._kept += self._wire.receive()
        if self._holding:
            return []
        kept, self._kept = self._kept, []
        return kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wire, name)
