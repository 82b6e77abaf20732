"""Keys of one request's blocks: their namespace, the chain of whole blocks, and the extra keys of a partial tail."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from flexkv.adapters.common.framed import framed
from flexkv.adapters.common.lora_names import RUN_PREFIX, LoraNames
from flexkv.cache.keys import EngineKeyChain, TokenChain, chain_seed, named_mark, namespace_digest
from flexkv.cache.stores.base import GROUP
from flexkv.facts.keys import Keys

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from flexkv.adapters.vllm.input_names import InputNames


NAMESPACE_BYTES = 32
"""Bytes of a namespace before its mark."""

REMEMBERED = 1024
"""Most namespaces of groups that are remembered: callers may name any number of namespaces."""


class RequestNamespaces:
    """Namespaces of requests: the engine's or, for requests with an adapter, one per content of the adapter, because
    vLLM's hashes have an adapter's name and not its content. A namespace that the caller names is a further part.

    Args:
        engine: 32 bytes; see `engine_namespace`.
        adapters: see `adapter_settings`.
    """

    def __init__(self, engine: bytes, adapters: Mapping[str, Any]) -> None:
        self.engine = engine
        self._adapters = framed(dict(adapters))
        self._loras = LoraNames()
        self._made: dict[str, bytes] = {}

    def of(self, request: Request, named: str = "") -> bytes:
        """The request's namespace: 32 bytes, and a mark if the caller names one (`named_mark`). Reads the files of an
        adapter that is new.

        Args:
            named: `RequestSettings.namespace`.
        """
        own = self._of_adapter(request)
        return namespace_digest({"request": own, "named": named}) + named_mark(named) if named else own

    @property
    def have_adapters(self) -> bool:
        """Whether a request has had an adapter."""
        return bool(self._made)

    def adapter_changed(self, path: str) -> bool:
        """Whether the files of an adapter that has a namespace have changed since the adapter was first used: the
        namespace no longer tells what the engine computes with."""
        return self._loras.has_changed(path)

    def _of_adapter(self, request: Request) -> bytes:
        adapter = request.lora_request
        if adapter is None:
            return self.engine
        name = self._loras.name(adapter.lora_path)
        if name.startswith(RUN_PREFIX):
            # vLLM may have read the files before they changed, and may load them again: as another number, or in place.
            name += f":{adapter.lora_int_id}:{adapter.load_inplace}"
        if (made := self._made.get(name)) is None:
            made = self._made[name] = namespace_digest(
                {"engine": self.engine, "adapter": name, "settings": self._adapters}
            )
        return made


@lru_cache(REMEMBERED)
def group_namespace(namespace: bytes, signature: bytes) -> bytes:
    """The namespace of a request's blocks in one KV group, with the request's mark. A group without a signature has the
    request's namespace."""
    if not signature:
        return namespace
    return namespace_digest({"request": namespace, "group": signature}) + namespace[NAMESPACE_BYTES:]


class BlockKeys(ABC):
    """Makes the keys of one request's blocks. Costs O(new blocks).

    Args:
        namespace: namespace of the request's blocks in one KV group; see `group_namespace`.
        hashes_per_block: number of the engine's hashes per block.
        names: names of images and other inputs.
    """

    def __init__(
        self,
        request: Request,
        namespace: bytes,
        block_tokens: int,
        hashes_per_block: int,
        names: InputNames,
    ) -> None:
        self.request = request
        self.namespace = namespace
        self.block_tokens = block_tokens
        self.names = names
        self._ratio = hashes_per_block
        self._chain = EngineKeyChain(namespace, GROUP)
        self._last_hash = b""

    def keys(self) -> Keys:
        """Keys of all whole blocks whose tokens are known, [blocks, KEY_BYTES]."""
        hashes, ratio = self.request.block_hashes, self._ratio
        known = len(self._chain)
        # A streaming session may remove its last tokens, and with them the hash of a block.
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
        """Adds the keys of blocks [known, blocks), or none if they cannot have keys."""

    @abstractmethod
    def parent(self, block: int) -> bytes | None:
        """The hash from which the key of whole block `block - 1` was made; None for block 0. Call it after `keys`."""

    def first_of_run(self) -> int | None:
        """The first block whose hash is valid only in this run; None without one."""
        if not self.request.mm_features:
            return None
        first = self.names.first_of_run(self.request)
        return None if first is None else first // self.block_tokens


class EngineBlockKeys(BlockKeys):
    """Makes keys from `request.block_hashes`, which cover everything by which vLLM tells requests apart.

    If the name of an input is valid only in this run, the keys contain the run's name, from the first block that the
    input reaches into. Blocks before it are served after a restart, like those of any other prompt.
    """

    def _extend(self, known: int, blocks: int) -> None:
        ratio = self._ratio
        hashes = self.request.block_hashes[(known + 1) * ratio - 1 : blocks * ratio : ratio]
        # Looked up each time, because a streaming session may get an image later.
        if (first := self.first_of_run()) is not None and first < blocks:
            plain = max(0, first - known)
            hashes = [*hashes[:plain], *(self.names.run + block_hash for block_hash in hashes[plain:])]
        self._chain.extend(hashes, start=known)

    def parent(self, block: int) -> bytes | None:
        if not block:
            return None
        block_hash = bytes(self.request.block_hashes[block * self._ratio - 1])
        first = self.first_of_run()
        return block_hash if first is None or block - 1 < first else self.names.run + block_hash


class TokenBlockKeys(BlockKeys):
    """Makes keys from the tokens and the caller's salt, for caches that other engines share. New blocks get no keys
    once the request has content that its tokens do not express."""

    @cached_property
    def _tokens(self) -> TokenChain:
        return TokenChain(self.block_tokens, chain_seed(None, self.request.cache_salt or None))

    def _forget(self) -> None:
        super()._forget()
        self._tokens.truncate(0)

    def _extend(self, known: int, blocks: int) -> None:
        # Looked up each time, because a streaming session may get an image later.
        if self.request.prompt_embeds is None and not self.request.mm_features:
            first, end = known * self.block_tokens, blocks * self.block_tokens
            self._tokens.extend(self.request.all_token_ids[first:end], start=first)
            self._chain.extend(self._tokens.digests[known:], start=known)

    def parent(self, block: int) -> bytes | None:
        return self._tokens.digests[block - 1].tobytes() if block else None


def tail_extra(request: Request, first_token: int, end_token: int) -> bytes | None:
    """The engine's extra keys (LoRA, salt) for tokens [first_token, end_token), framed.

    None if a tail must not be cached at all: its token ids do not express its content (prompt embeddings), or a
    multi-modal input reaches into it, which the engine identifies only for whole blocks.
    """
    if request.prompt_embeds is not None:
        return None
    for feature in request.mm_features:
        position = feature.mm_position
        if position.offset < end_token and position.offset + position.length > first_token:
            return None
    extra, _ = generate_block_hash_extra_keys(request, first_token, end_token, len(request.mm_features))
    return framed(extra)
