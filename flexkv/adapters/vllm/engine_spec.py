"""What the engine says of itself at its start, as far as its cache needs it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flexkv.adapters.vllm.geometry import BlockGeometry
from flexkv.config import FlexKVConfig
from flexkv.unit.base import CacheRole
from flexkv.unit.capacity import PromptLimit
from flexkv.unit.ranks import UnitOwner


@dataclass(frozen=True, slots=True)
class EngineRole(CacheRole):
    """What a vLLM engine does with the cache: loads unless its kv_role is kv_producer, stores unless it is kv_consumer,
    recomputes if its kv_load_failure_policy is recompute.

    Attributes:
        drop_last_block: see `Lookups`.
        ends_copies: a reset ends every copy before it returns: the engine may take its KV memory away after it and
            tells no worker (sleep in vLLM 0.32).
        stores_end_in_step: see `EagerStores`.
    """

    drop_last_block: bool = False
    ends_copies: bool = False
    stores_end_in_step: bool = False


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine, or one of its data-parallel parts.

    Attributes:
        ranks: workers.
        step_tokens: that the engine computes in one step at most.
    """

    config: FlexKVConfig
    geometry: BlockGeometry
    owner: UnitOwner
    ranks: int
    step_tokens: int
    role: EngineRole = EngineRole()
    prompt_limit: PromptLimit | None = None

    @property
    def namespace(self) -> bytes:
        """32 bytes, of every key."""
        return self.owner.namespace

    def cache_role(self, shared: bool) -> CacheRole:
        """
        Args:
            shared: workers live in processes of their own.
        """
        return replace(self.role, shared=shared)
