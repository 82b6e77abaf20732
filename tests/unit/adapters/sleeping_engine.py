"""A stand-in for vLLM 0.33 while it sleeps and wakes. A test can make its copies hang. tests/engines_vllm33 tests the
sleep with that version's own Python code.
"""

from __future__ import annotations

from tests.unit.adapters.mini_engine import MiniEngine

POISON = -7.0
"""The content of the former KV memory while the engine sleeps, so that a test notices if anything reads or writes that
memory."""


class SleepingEngine(MiniEngine):
    """A mini engine that can sleep. It calls the connector's hooks in the order of vLLM 0.33."""

    def sleep(self) -> None:
        """Resets the engine's and the connector's cache. Then, in each worker, calls the connector's hook and drops the
        KV memory.
        """
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
        """Maps the KV memory again, with different content. Calls each worker's hook, and repeats the handshakes."""
        self.pools.spoil()
        for worker in self.workers:
            worker.restore_kv_caches()
        self.take_handshakes()
