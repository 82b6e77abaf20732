"""A stand-in for vLLM 0.33 whose copies can be made to hang: its order of calls around a sleep, and in a step that ends
only after a draft model has run. tests/engines_vllm33 runs that engine's own Python through the same cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flexkv.adapters.vllm.metadata import ConnectorMetadata, WorkerMetadata
from flexkv.adapters.vllm.worker import WorkerSide
from tests.unit.adapters.mini_engine import MiniEngine

POISON = -7.0
"""The content of the former KV memory while the engine sleeps: it reveals whoever reads or writes there."""


class SleepingEngine(MiniEngine):
    """A mini engine that can sleep, and whose draft model writes the last layer after the step's report.

    Args:
        early_save: ends the step before the draft model has run: the control.
    """

    def __init__(self, early_save: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self._early_save = early_save

    # --- a sleep, in 0.33's order ---

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

    # --- a step, with its end deferred ---

    def _run_worker(
        self,
        worker: WorkerSide,
        orders: ConnectorMetadata,
        scheduled: dict[str, int],
        before_forward: Callable[[], None] | None,
    ) -> tuple[set[str], set[int], WorkerMetadata | None]:
        worker.before_forward(orders)
        sync = any(job.sync for job in orders.loads)
        if sync:
            worker.start_loads(orders)
        layers = list(self.pools.write_by_layer(worker.rank, []))
        writes = self.pools.write_by_layer(worker.rank, self._computed_parts(scheduled))
        for _ in layers[:-1]:
            next(writes)
        if not sync:
            worker.start_loads(orders)
        if self._early_save:
            worker.finish_stores(orders)
        worker.poll(orders.idle, orders.disk_busy)
        report = worker.reports.take_finished(), worker.reports.take_failed_blocks(), worker.take_metadata()
        for _ in writes:  # the draft model's layer
            pass
        if not self._early_save:
            worker.submit_stores(orders)
        return report
