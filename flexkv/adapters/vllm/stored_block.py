"""What KV events say about one stored block, in memory, in a file, and in the engine's own format."""

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
    """One block. In a file it is a MessagePack array of the fields, in this order.

    Attributes:
        number: the engine's number of the KV group.
        block_hash: the engine's complete hash.
        parent: hash of the block before it; None for the first block of a prompt, and if only the hash is known.
        tokens: empty if only the hash is known. An array, because a list would keep an object for each token: 700 bytes
            instead of 150 for 16 tokens. The engine's own tensors of tokens have 32 bits, too.
        extra_keys: as in the engine's event, for this block only.
        session_id: the session that stored it; None in a file.
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
        """The hash as events have it."""
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
        """The block as in a file, without the session that stored it."""
        return _encode(self if self.session_id is None else replace(self, session_id=None))


def token_array(tokens: Iterable[int]) -> Tokens:
    return array("i", tokens)


_encode = Encoder(enc_hook=Tokens.tolist).encode
unpacked = Decoder(StoredBlock, dec_hook=lambda kind, tokens: token_array(tokens)).decode


def _tuples(value: Any) -> Any:
    """MessagePack has no tuples; the engine's extra keys are tuples, also within tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def hashed_request(tokens: Sequence[int], salt: str, hash_tokens: int, algorithm: str) -> Request:
    """A request of text, with the engine's block hashes.

    Args:
        hash_tokens: tokens that one of the engine's block hashes covers.
        algorithm: name of the engine's block hash.
    """
    sampling = SamplingParams(max_tokens=1)
    request = Request("flexkv", list(tokens), sampling, None, cache_salt=salt or None)
    request.block_hashes = get_request_block_hasher(hash_tokens, get_hash_fn_by_name(algorithm))(request)
    return request


def hash_identity(hash_tokens: int, algorithm: str) -> bytes:
    """32 bytes that differ between engines that give the same block different hashes: by version, hash function or the
    function's seed (`PYTHONHASHSEED`). Call it once the engine has chosen its seed. Arguments as for
    `hashed_request`."""
    probe = hashed_request(range(2 * hash_tokens), "s", hash_tokens, algorithm)
    digest = sha256(
        _FORMAT + b"\0" + vllm_version.encode() + b"\0" + b"".join(map(bytes, probe.block_hashes))
    ).digest()
    assert len(digest) == IDENTITY_BYTES
    return digest
