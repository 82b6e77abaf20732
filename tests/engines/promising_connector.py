"""A connector that promises tokens which it does not have. It runs beside flexkv's connector in a MultiConnector.

A request asks for such a promise with `extra_args={"kv_transfer_params": {"promised_tokens": n}}`. The connector does
not write the promised blocks, and reports them as failed in the step that should have loaded them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


@dataclass
class BrokenPromises(KVConnectorMetadata):
    """The promised blocks that this step should load. The worker's part of the connector reports them as failed."""

    blocks: list[int] = field(default_factory=list)


class PromisingConnector(KVConnectorBase_V1):
    """Promises tokens once per request, and never loads them."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_tokens = vllm_config.cache_config.block_size
        self._promised: dict[str, int] = {}
        self._orders = BrokenPromises()
        self._failed: set[int] = set()

    # --- the connector in the scheduler's process ---

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        wanted = int((request.kv_transfer_params or {}).get("promised_tokens", 0))
        if request.request_id in self._promised or wanted <= num_computed_tokens:
            return 0, False
        self._promised[request.request_id] = num_computed_tokens
        return wanted - num_computed_tokens, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            first = self._promised[request.request_id] // self._block_tokens
            end = first + num_external_tokens // self._block_tokens
            self._orders.blocks += blocks.get_block_ids()[0][first:end]

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        orders, self._orders = self._orders, BrokenPromises()
        return orders

    # --- the connector in the worker's process ---

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        orders = self._get_connector_metadata()
        assert isinstance(orders, BrokenPromises)
        self._failed.update(orders.blocks)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing, because the connector loads nothing."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Does nothing, because the connector stores nothing."""

    def wait_for_save(self) -> None:
        """Does nothing, because the connector stores nothing."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed
