"""What the scheduler's side remembers of one request from its first lookup to its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from flexkv.cache.base import Keys, MatchResult
from flexkv.cache.keys import EngineKeyChain
from flexkv.transfer.graph import BlockIds, OpId

if TYPE_CHECKING:
    from vllm.v1.request import Request


GROUP = 0
"""The one KV group of a model that this adapter accepts."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """The last answer given to the engine for a request.

    Attributes:
        start_block: whole blocks that the engine had itself when it asked.
        tokens: tokens promised beyond those.
    """

    start_block: int
    tokens: int
    match: MatchResult


@dataclass(slots=True, eq=False)
class RequestTracker:
    """One live request.

    Attributes:
        namespace: of its keys, 32 bytes.
        block_ids: the engine's block table of the request, in order.
        cursor: blocks before it have been offered to the cache.
        retry_step: after an offer was dropped, not to be repeated before this step.
        loading: op of the async load in flight, if any.
        stale: the KV held was computed with weights that have been replaced; nothing of it may be stored.
        suspect_from: number of the first block computed from a failed load and not computed again yet.
        own_from: number of the first block that the engine's own prefix cache did not give.
        certain: tokens whose KV was certain after the last step; kept for lazy stores.
        counted: this admission's lookup is in the metrics.
    """

    request: Request
    namespace: bytes
    skip_save: bool
    hashes_per_block: int = 1
    block_ids: list[int] = field(default_factory=list)
    cursor: int = 0
    retry_step: int = 0
    lookup: Lookup | None = None
    loading: OpId | None = None
    stale: bool = False
    suspect_from: int | None = None
    own_from: int = 0
    certain: int = 0
    counted: bool = False
    _chain: EngineKeyChain = field(init=False)
    _last_hash: bytes = b""

    def __post_init__(self) -> None:
        self._chain = EngineKeyChain(self.namespace, GROUP)

    @property
    def request_id(self) -> str:
        return str(self.request.request_id)

    def keys(self) -> Keys:
        """Keys of all whole blocks whose tokens are known, [blocks, KEY_BYTES]; only new blocks cost anything."""
        hashes, ratio = self.request.block_hashes, self.hashes_per_block
        known = len(self._chain)
        # A streaming session may take back its last tokens, and with them the hash of a block.
        if known and (len(hashes) < known * ratio or hashes[known * ratio - 1] != self._last_hash):
            self._chain.truncate(0)
            known = 0
        blocks = len(hashes) // ratio
        if blocks > known:
            self._chain.extend(hashes[(known + 1) * ratio - 1 : blocks * ratio : ratio], start=known)
            self._last_hash = hashes[blocks * ratio - 1]
        return self._chain.keys

    def parent_hash(self, block: int) -> bytes | None:
        """The engine's hash of the whole block before number `block`; None for the first."""
        return bytes(self.request.block_hashes[block * self.hashes_per_block - 1]) if block else None

    def blocks(self, first: int, end: int) -> BlockIds:
        """Engine block ids of the request's blocks [first, end), int32."""
        return np.array(self.block_ids[first:end], dtype=np.int32)

    def restart(self) -> None:
        """The engine took all blocks away; the request starts again with others."""
        # A new list: the old one may still be looked at.
        self.block_ids = []
        self.cursor = 0
        self.retry_step = 0
        self.stale = False
        self.suspect_from = None
        self.certain = 0
        self.counted = False


def wants_no_store(request: Request) -> bool:
    """Whether the caller asked that nothing of this request be stored.

    `kv_transfer_params={"skip_save": true}`, or `flexkv.skip_save` in the sampling parameters' extra_args.
    """
    params: Mapping[str, Any] = request.kv_transfer_params or {}
    sampling = request.sampling_params
    extra: Mapping[str, Any] = (sampling.extra_args if sampling is not None else None) or {}
    return bool(params.get("skip_save") or extra.get("flexkv.skip_save"))
