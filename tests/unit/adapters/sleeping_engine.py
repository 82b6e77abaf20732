"""A stand-in for vLLM 0.33 around a sleep, whose copies can be made to hang. tests/engines_vllm33 tests the sleep of
that engine's own Python code.
"""

from __future__ import annotations

from tests.unit.adapters.mini_engine import MiniEngine

POISON = -7.0
"""The content of the former KV memory while the engine sleeps: it reveals whoever reads or writes there."""


class SleepingEngine(MiniEngine):
    """A mini engine that can sleep, with the order of calls of vLLM 0.33."""

    def sleep(self) -> None:
        """Pauses, resets engine and connector, and then in each worker calls the hook and drops the memory."""
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
        """Whether any byte was written to the former KV memory."""
        return any(bool((cache != POISON).any()) for caches in self.pools.caches for cache in caches.values())

    def wake_up(self) -> None:
        """Maps the memory again with other content, calls the hook, and then makes the handshakes once more."""
        self.pools.spoil()
        for worker in self.workers:
            worker.restore_kv_caches()
        self.take_handshakes()
