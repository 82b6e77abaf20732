"""Keys of a prompt from its token ids, for plugins' calls, by vLLM's own request and block hashes."""

from __future__ import annotations

from collections.abc import Sequence

from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

from flexkv.adapters.vllm.requests import RequestTable
from flexkv.facts.keys import Keys


class RequestPromptKeys:
    """A `PromptKeys`: the keys of a request of text without an adapter.

    Args:
        hash_tokens: tokens that one of the engine's block hashes covers.
        algorithm: name of the engine's block hash.
    """

    def __init__(self, requests: RequestTable, hash_tokens: int, algorithm: str) -> None:
        self._requests = requests
        self._hasher = get_request_block_hasher(hash_tokens, get_hash_fn_by_name(algorithm))

    def __call__(self, tokens: Sequence[int], salt: str) -> list[Keys]:
        request = Request(
            request_id="flexkv plugin",
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            cache_salt=salt or None,
        )
        request.block_hashes = self._hasher(request)
        return self._requests.keys_of(request)
