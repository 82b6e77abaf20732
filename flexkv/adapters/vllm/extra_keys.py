"""What besides its tokens tells a block apart, as bytes: the extra keys of blocks that have no engine key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from flexkv.adapters.common.framed import framed

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
