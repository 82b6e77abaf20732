"""A stand-in for vLLM 0.33 around a sleep, whose copies can be made to hang. tests/engines_vllm33 has that engine's own
Python sleep."""

from __future__ import annotations

from tests.unit.adapters.mini_engine import MiniEngine

POISON = -7.0
"""The content of the former KV memory while the engine sleeps: it reveals whoever reads or writes there."""


class SleepingEngine(MiniEngine):
    """A mini engine that can sleep, in 0.33's order of calls."""

    def sleep(self) -> None:
        """Pause, reset of engine and connector, then in each worker the hook and the loss of the memory."""
        assert self.pool.reset_prefix_cache(), "requests hold blocks: vLLM does not sleep"
        assert self.side.reset(), "vLLM does not sleep when the connector's reset fails"
        self.lose_memory()

    def lose_memory(self) -> None:
        for worker in self.workers:
            worker.unregister_kv_caches()
        for caches in self.pools.caches:
            for cache in caches.values():
                cache.fill_(POISON)

    @property
    def was_touched(self) -> bool:
        """Whether anything was written to the former KV memory."""
        return any(bool((cache != POISON).any()) for caches in self.pools.caches for cache in caches.values())

    def wake_up(self) -> None:
        """The memory is mapped again with other content, then the hook is called, then come the handshakes once
        more."""
        self.pools.spoil()
        for worker in self.workers:
            worker.restore_kv_caches()
        self.take_handshakes()
