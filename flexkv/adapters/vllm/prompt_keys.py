"""Keys of a prompt from its token ids, for plugins' calls, by vLLM's own request and block hashes."""

from __future__ import annotations

from collections.abc import Sequence

from flexkv.adapters.vllm.requests import RequestTable
from flexkv.adapters.vllm.stored_block import hashed_request
from flexkv.facts.keys import Keys


class RequestPromptKeys:
    """A `PromptKeys`: the keys of a request of text without an adapter. Arguments as for `hashed_request`."""

    def __init__(self, requests: RequestTable, hash_tokens: int, algorithm: str) -> None:
        self._requests = requests
        self._hashes = (hash_tokens, algorithm)

    def __call__(self, tokens: Sequence[int], salt: str) -> list[Keys]:
        return self._requests.keys_of(hashed_request(tokens, salt, *self._hashes))
