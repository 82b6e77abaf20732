"""Makes the keys of a request's complete blocks, their namespace, and the extra keys of a partial tail."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from flexkv.adapters.common.framed import framed
from flexkv.adapters.common.lora_names import RUN_PREFIX
from flexkv.adapters.vllm.adapter_loads import adapter_names
from flexkv.cache.keys import EngineKeyChain, TokenChain, chain_seed, named_mark, namespace_digest
from flexkv.cache.stores.base import GROUP
from flexkv.facts.keys import Keys

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from flexkv.adapters.vllm.input_names import InputNames


NAMESPACE_BYTES = 32
"""Size of a namespace without its mark, in bytes."""

REMEMBERED = 1024
"""Largest number of results of `group_namespace` that are remembered. Callers may name any number of namespaces, so
there may be many results."""


class RequestNamespaces:
    """Computes the namespaces of requests. A request without an adapter has the engine's namespace. A request with an
    adapter has a namespace computed from the adapter's content, because vLLM's hashes contain only the adapter's name.
    If the caller names a namespace, it becomes part of the request's namespace as well.

    Args:
        engine: the engine's namespace, 32 bytes; see `engine_namespace`.
        adapters: the engine's settings that change the KV of requests with adapters; see `adapter_settings`.
    """

    def __init__(self, engine: bytes, adapters: Mapping[str, Any]) -> None:
        self.engine = engine
        self._adapters = framed(dict(adapters))
        self._loras = adapter_names()
        self._made: dict[str, bytes] = {}

    def of(self, request: Request, named: str = "") -> bytes:
        """Returns the request's namespace: 32 bytes, followed by a mark if the caller names a namespace (`named_mark`).
        Reads the files of an adapter on its first use.

        Args:
            named: the namespace that the caller names (`RequestSettings.namespace`); empty for none.
        """
        own = self._of_adapter(request)
        return namespace_digest({"request": own, "named": named}) + named_mark(named) if named else own

    @property
    def have_adapters(self) -> bool:
        """Whether any request so far has had an adapter."""
        return bool(self._made)

    def adapter_changed(self, path: str) -> bool:
        """Whether the adapter's files have changed since its first use. If so, the adapter's namespace no longer
        identifies the weights with which the engine computes."""
        return self._loras.has_changed(path)

    def _of_adapter(self, request: Request) -> bytes:
        adapter = request.lora_request
        if adapter is None:
            return self.engine
        name = self._loras.name(adapter.lora_path)
        if name.startswith(RUN_PREFIX):
            # A name with RUN_PREFIX identifies no content. vLLM may load the adapter again, under another number or in
            # place. So the namespace also contains the number and `load_inplace`.
            name += f":{adapter.lora_int_id}:{adapter.load_inplace}"
        if (made := self._made.get(name)) is None:
            made = self._made[name] = namespace_digest(
                {"engine": self.engine, "adapter": name, "settings": self._adapters}
            )
        return made


@lru_cache(REMEMBERED)
def group_namespace(namespace: bytes, signature: bytes) -> bytes:
    """Returns the namespace of a request's blocks in one KV group, including the request's mark. If the group has no
    signature, this is the request's namespace."""
    if not signature:
        return namespace
    return namespace_digest({"request": namespace, "group": signature}) + namespace[NAMESPACE_BYTES:]


class BlockKeys(ABC):
    """Makes the keys of one request's blocks. Costs O(new blocks).

    Args:
        namespace: the namespace of the request's blocks in one KV group; see `group_namespace`.
        block_tokens: number of tokens per block.
        hashes_per_block: how many of the engine's hashes a block has.
        names: decides which names of images and other inputs are valid only in this run.
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
        """Returns the keys of all complete blocks whose tokens are known, shape [blocks, KEY_BYTES]."""
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
        """Adds the keys of blocks [known, blocks). Adds none if these blocks cannot have keys."""

    @abstractmethod
    def parent(self, block: int) -> bytes | None:
        """Returns the hash from which the key of block `block - 1` was made; None if `block` is 0.

        Call order:
            After `keys`.
        """

    def first_of_run(self) -> int | None:
        """Returns the index of the first block whose hash is valid only in this run; None if there is none."""
        if not self.request.mm_features:
            return None
        first = self.names.first_of_run(self.request)
        return None if first is None else first // self.block_tokens


class EngineBlockKeys(BlockKeys):
    """Makes keys from `request.block_hashes`, which depend on everything by which vLLM distinguishes blocks.

    If the name of an input is valid only in this run, the run's random bytes become part of the keys, from the first
    block on that contains a part of the input. Earlier blocks can be found after a restart, like other prompts' blocks.
    """

    def _extend(self, known: int, blocks: int) -> None:
        ratio = self._ratio
        hashes = self.request.block_hashes[(known + 1) * ratio - 1 : blocks * ratio : ratio]
        # `first_of_run` is called each time, because a streaming session may get an image later.
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
    """Makes keys from the tokens and the caller's salt, so that other engines can make the same keys. If a request has
    content that its tokens do not express, such as an image, its new blocks get no keys."""

    @cached_property
    def _tokens(self) -> TokenChain:
        return TokenChain(self.block_tokens, chain_seed(None, self.request.cache_salt or None))

    def _forget(self) -> None:
        super()._forget()
        self._tokens.truncate(0)

    def _extend(self, known: int, blocks: int) -> None:
        # The request is checked each time, because a streaming session may get an image later.
        if self.request.prompt_embeds is None and not self.request.mm_features:
            first, end = known * self.block_tokens, blocks * self.block_tokens
            self._tokens.extend(self.request.all_token_ids[first:end], start=first)
            self._chain.extend(self._tokens.digests[known:], start=known)

    def parent(self, block: int) -> bytes | None:
        return self._tokens.digests[block - 1].tobytes() if block else None


def tail_extra(request: Request, first_token: int, end_token: int) -> bytes | None:
    """Returns the engine's extra keys (LoRA, salt) for the tail of tokens [first_token, end_token), as bytes.

    Returns None if the tail must not be cached. This is so if its token ids do not express its content (prompt
    embeddings), or if it contains a part of a multi-modal input, which the engine identifies only for complete blocks.
    """
    if request.prompt_embeds is not None:
        return None
    for feature in request.mm_features:
        position = feature.mm_position
        if position.offset < end_token and position.offset + position.length > first_token:
            return None
    extra, _ = generate_block_hash_extra_keys(request, first_token, end_token, len(request.mm_features))
    return framed(extra)
