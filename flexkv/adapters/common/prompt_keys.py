"""Keys of a prompt from its token ids alone, for plugins' calls, where an engine's block hashes are a token chain."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flexkv.cache.keys import EngineKeyChain, TokenChain
from flexkv.errors import PluginCallError
from flexkv.facts.keys import Keys

GROUP = 0
"""The one KV group of the engines whose adapters use this."""


class TokenPromptKeys:
    """A `PromptKeys`.

    Args:
        namespace: returns the namespace of the engine's keys, which changes with its weights.
        seed_of: makes the chain's seed of a cache salt.
    """

    def __init__(
        self, block_tokens: int, namespace: Callable[[], bytes], seed_of: Callable[[str], bytes]
    ) -> None:
        self._block_tokens = block_tokens
        self._namespace = namespace
        self._seed_of = seed_of

    def __call__(self, tokens: Sequence[int], salt: str) -> list[Keys]:
        """
        Raises:
            TokenError: a token is not in [0, 2**32).
            PluginCallError: the engine makes another key of a salt than this can.
        """
        chain = TokenChain(self._block_tokens, self._seed_of(salt))
        chain.extend(tokens)
        keys = EngineKeyChain(self._namespace(), GROUP)
        keys.extend(chain.digests)
        return [keys.keys]


def without_salt(salt: str) -> bytes:
    """The seed of a chain of an engine that numbers its salts by itself."""
    if salt:
        raise PluginCallError("this engine gives salts numbers of its own; ask of prompts without one")
    return b""
