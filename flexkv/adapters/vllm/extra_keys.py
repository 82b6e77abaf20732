"""What besides its tokens tells a block apart, as bytes: the extra keys of blocks that have no engine key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

if TYPE_CHECKING:
    from vllm.v1.request import Request


def tail_extra(request: Request, first_token: int, end_token: int) -> bytes | None:
    """The engine's extra keys (LoRA, salt) for tokens [first_token, end_token), framed.

    None where a tail must not be cached at all: its content is not in its token ids (prompt embeddings), or a
    multi-modal input reaches into it, whose identity the engine ties to whole blocks.
    """
    if request.prompt_embeds is not None:
        return None
    for feature in request.mm_features:
        position = feature.mm_position
        if position.offset < end_token and position.offset + position.length > first_token:
            return None
    extra, _ = generate_block_hash_extra_keys(request, first_token, end_token, len(request.mm_features))
    return framed(extra)


def framed(value: Any) -> bytes:
    """A value as bytes: kind, length, content. Different values never give the same bytes.

    Raises:
        TypeError: a kind of value that has no stable form.
    """
    if value is None:
        return _frame(b"N", b"")
    if isinstance(value, bool):
        return _frame(b"B", bytes([value]))
    if isinstance(value, int):
        return _frame(b"I", str(value).encode())
    if isinstance(value, float):
        return _frame(b"F", value.hex().encode())
    if isinstance(value, str):
        return _frame(b"S", value.encode())
    if isinstance(value, bytes):
        return _frame(b"Y", value)
    if isinstance(value, (tuple, list)):
        return _frame(b"T", b"".join(framed(item) for item in value))
    if isinstance(value, dict):
        items = sorted((framed(key), framed(item)) for key, item in value.items())
        return _frame(b"D", b"".join(key + item for key, item in items))
    raise TypeError(f"{type(value).__name__} has no stable form in a key: {value!r}")


def _frame(kind: bytes, content: bytes) -> bytes:
    return kind + len(content).to_bytes(8, "little") + content
