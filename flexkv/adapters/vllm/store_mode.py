"""When blocks are offered to the cache: the contract of the modes, and the mode that offers nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING

from flexkv.adapters.vllm.metadata import ConnectorMetadata
from flexkv.adapters.vllm.requests import RequestTracker
from flexkv.transfer.graph import BlockIds, TransferGraph

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class StoreMode(ABC):
    """One engine's stores. Called by the scheduler's thread; plans and never waits."""

    @abstractmethod
    def plan_step(self, output: SchedulerOutput, step: int, orders: ConnectorMetadata) -> None:
        """Adds the step's stores to its orders. Costs O(requests + new blocks)."""

    @abstractmethod
    def started(self, tracker: RequestTracker) -> None:
        """The request has a new block table."""

    @abstractmethod
    def preempted(self, tracker: RequestTracker) -> None:
        """The engine takes the request's blocks away; the tracker still knows them."""

    @abstractmethod
    def ended(self, tracker: RequestTracker, step: int) -> list[TransferGraph]:
        """The request has ended and its blocks are about to be freed: the last stores of what it computed."""

    @abstractmethod
    def load_failed(self, blocks: Iterable[int]) -> None:
        """These blocks hold no valid KV: targets of a failed load, and what requests that have let go of them computed
        from those. Live requests are dealt with by their `cursor` and `suspect_from`."""

    @abstractmethod
    def unpublished(self, blocks: BlockIds) -> None:
        """A store of these engine blocks ended without being published."""

    @abstractmethod
    def reset(self, stale_hashes: dict[int, bytes]) -> None:
        """New weights. `stale_hashes`: engine blocks that still carry the hash of KV of the old ones."""


class NoStores(StoreMode):
    """For an engine that only reads the cache (vLLM's kv_role is kv_consumer)."""

    def plan_step(self, output: SchedulerOutput, step: int, orders: ConnectorMetadata) -> None:
        """Nothing is stored."""

    def started(self, tracker: RequestTracker) -> None:
        """Nothing is stored."""

    def preempted(self, tracker: RequestTracker) -> None:
        """Nothing is stored."""

    def ended(self, tracker: RequestTracker, step: int) -> list[TransferGraph]:
        return []

    def load_failed(self, blocks: Iterable[int]) -> None:
        """Nothing is stored."""

    def unpublished(self, blocks: BlockIds) -> None:
        """Nothing is stored."""

    def reset(self, stale_hashes: dict[int, bytes]) -> None:
        """Nothing is stored."""
