"""Keys of one request's blocks: from vLLM's own hashes, or from its tokens where engines share a cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from flexkv.adapters.vllm.geometry import BlockGeometry
from flexkv.cache.base import Keys
from flexkv.cache.keys import EngineKeyChain, TokenChain, chain_seed

if TYPE_CHECKING:
    from vllm.v1.request import Request

GROUP = 0
"""The one KV group of a model that this adapter accepts."""


class BlockKeys(ABC):
    """Only new blocks cost anything.

    Args:
        namespace: of the request, 32 bytes.
    """

    def __init__(self, request: Request, namespace: bytes, geometry: BlockGeometry) -> None:
        self.request = request
        self.namespace = namespace
        self._ratio = geometry.hashes_per_block
        self._chain = EngineKeyChain(namespace, GROUP)
        self._last_hash = b""

    def keys(self) -> Keys:
        """Of all whole blocks whose tokens are known, [blocks, KEY_BYTES]."""
        hashes, ratio = self.request.block_hashes, self._ratio
        known = len(self._chain)
        # A streaming session may take back its last tokens, and with them the hash of a block.
        if known and (len(hashes) < known * ratio or hashes[known * ratio - 1] != self._last_hash):
            self._forget()
            known = 0
        blocks = len(hashes) // ratio
        if blocks > known:
            self._extend(known, blocks)
            if made := len(self._chain):
                self._last_hash = hashes[made * ratio - 1]
        return self._chain.keys

    def _forget(self) -> None:
        self._chain.truncate(0)

    @abstractmethod
    def _extend(self, known: int, blocks: int) -> None:
        """Adds the keys of blocks [known, blocks), or of none."""

    @abstractmethod
    def parent(self, block: int) -> bytes | None:
        """What the key of whole block `block - 1` was made from; None for the first. To be called after `keys`."""


class EngineBlockKeys(BlockKeys):
    """From `request.block_hashes`, which hold all that vLLM keeps requests apart by."""

    def _extend(self, known: int, blocks: int) -> None:
        ratio = self._ratio
        self._chain.extend(
            self.request.block_hashes[(known + 1) * ratio - 1 : blocks * ratio : ratio], start=known
        )

    def parent(self, block: int) -> bytes | None:
        return bytes(self.request.block_hashes[block * self._ratio - 1]) if block else None


class TokenBlockKeys(BlockKeys):
    """From the tokens and the caller's salt. Blocks have no keys once the request's content is not in its tokens."""

    def __init__(self, request: Request, namespace: bytes, geometry: BlockGeometry) -> None:
        super().__init__(request, namespace, geometry)
        self._block_tokens = geometry.block_tokens
        self._tokens = TokenChain(geometry.block_tokens, chain_seed(None, request.cache_salt or None))

    def _forget(self) -> None:
        super()._forget()
        self._tokens.truncate(0)

    def _extend(self, known: int, blocks: int) -> None:
        # Asked each time: a streaming session may take an image later.
        if self.request.prompt_embeds is None and not self.request.mm_features:
            first, end = known * self._block_tokens, blocks * self._block_tokens
            self._tokens.extend(self.request.all_token_ids[first:end], start=first)
            self._chain.extend(self._tokens.digests[known:], start=known)

    def parent(self, block: int) -> bytes | None:
        return self._tokens.digests[block - 1].tobytes() if block else None
