"""The facts about one stored block that KV events report. The facts have one form in memory, one in files, and one in
the engine's events."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.msgpack import Decoder, Encoder
from msgspec.structs import replace
from vllm import SamplingParams
from vllm import __version__ as vllm_version
from vllm.distributed.kv_events import BlockStored
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    ExternalBlockHash,
    get_request_block_hasher,
    maybe_convert_block_hash,
)
from vllm.v1.request import Request

from flexkv.storage.frame_log import IDENTITY_BYTES

LOCAL = "LOCAL"

_FORMAT = b"flexkv vllm stored blocks v4"

if TYPE_CHECKING:
    Tokens = array[int]
else:
    Tokens = array  # not generic before Python 3.12, and msgspec evaluates annotations


class StoredBlock(Struct, array_like=True, gc=False):
    """One stored block. In a file, it is a MessagePack array of these fields, in this order.

    Attributes:
        number: the engine's number of the KV group.
        block_hash: the engine's complete hash of the block.
        parent: the engine's hash of the previous block; None for the first block of a prompt, and if only `block_hash`
            is known.
        tokens: the block's token ids; empty if only `block_hash` is known. An array of 32-bit integers takes 150 bytes
            for 16 tokens; a list would take 700, because it has an object per token. vLLM's own tensors of token ids
            have 32 bits as well.
        block_tokens: number of tokens in a block.
        lora_id, lora_name: the adapter's number and name, as in the engine's event; None without an adapter.
        extra_keys: the block's part of the engine's extra keys; None if it has none.
        session_id: the session whose request stored the block; None if there is no session, and always in a file.
    """

    number: int
    block_hash: bytes
    parent: bytes | None
    tokens: Tokens
    block_tokens: int
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: tuple[Any, ...] | None = None
    session_id: str | None = None

    @property
    def name(self) -> ExternalBlockHash:
        """The block's hash in the form that events have."""
        return maybe_convert_block_hash(BlockHash(self.block_hash))

    def event(self, medium: str) -> BlockStored:
        parent = self.parent
        return BlockStored(
            block_hashes=[self.name],
            parent_block_hash=None if parent is None else maybe_convert_block_hash(BlockHash(parent)),
            token_ids=self.tokens.tolist(),
            block_size=self.block_tokens,
            lora_id=self.lora_id,
            medium=medium,
            lora_name=self.lora_name,
            extra_keys=None if self.extra_keys is None else [_tuples(self.extra_keys)],
            group_idx=self.number,
            locality=LOCAL,
            session_id=self.session_id,
        )

    def packed(self) -> bytes:
        """Returns the block in its form in a file, which does not contain the session."""
        return _encode(self if self.session_id is None else replace(self, session_id=None))


def token_array(tokens: Iterable[int]) -> Tokens:
    return array("i", tokens)


_encode = Encoder(enc_hook=Tokens.tolist).encode
unpacked = Decoder(StoredBlock, dec_hook=lambda kind, tokens: token_array(tokens)).decode


def _tuples(value: Any) -> Any:
    """Turns lists within `value` back into tuples, at every depth. The engine's extra keys are nested tuples, but
    MessagePack has only arrays, which it decodes as lists."""
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def hashed_request(tokens: Sequence[int], salt: str, hash_tokens: int, algorithm: str) -> Request:
    """Makes an engine's request for a text prompt, with the block hashes that the engine would compute.

    Args:
        salt: the request's cache salt; empty for none.
        hash_tokens: how many tokens one of the engine's block hashes covers.
        algorithm: name of the engine's hash function for blocks.
    """
    sampling = SamplingParams(max_tokens=1)
    request = Request("flexkv", list(tokens), sampling, None, cache_salt=salt or None)
    request.block_hashes = get_request_block_hasher(hash_tokens, get_hash_fn_by_name(algorithm))(request)
    return request


def hash_identity(hash_tokens: int, algorithm: str) -> bytes:
    """Returns 32 bytes that differ between engines whose hashes of the same block differ, because of vLLM's version,
    the hash function, or the function's seed (`PYTHONHASHSEED`). The arguments are those of `hashed_request`.

    Call order:
        After the engine has chosen its seed.
    """
    probe = hashed_request(range(2 * hash_tokens), "s", hash_tokens, algorithm)
    digest = sha256(
        _FORMAT + b"\0" + vllm_version.encode() + b"\0" + b"".join(map(bytes, probe.block_hashes))
    ).digest()
    assert len(digest) == IDENTITY_BYTES
    return digest
