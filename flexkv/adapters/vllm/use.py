"""What one engine is configured to do with the cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Use:
    """What the engine wants of the cache.

    Attributes:
        loads: answer lookups (vLLM's kv_role is kv_both or kv_consumer).
        stores: store blocks (kv_both or kv_producer).
        drop_last_block: see `Lookups`.
        ends_copies: a reset ends every copy before it returns: the engine may take its KV memory away after it and
            tells no worker (sleep in vLLM 0.32).
        recomputes: what a load did not bring is computed (kv_load_failure_policy is recompute).
    """

    loads: bool = True
    stores: bool = True
    drop_last_block: bool = False
    recomputes: bool = False
    ends_copies: bool = False
