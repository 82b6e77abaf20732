"""Keys of a prompt from its token ids alone, where an engine's block hashes are a token chain."""

from __future__ import annotations

from collections.abc import Sequence

from flexkv.cache.keys import EngineKeyChain, TokenChain
from flexkv.errors import PluginCallError
from flexkv.facts.keys import Keys

GROUP = 0
"""The one KV group of the engines whose adapters use this."""


class TokenKeys:
    """Index keys of one request's blocks, made from its tokens. Costs O(new blocks).

    Args:
        namespace: the request's namespace.
        seed: the chain's seed.
    """

    def __init__(self, block_tokens: int, namespace: bytes, seed: bytes = b"") -> None:
        self._arguments = (block_tokens, namespace, seed)
        self._chain = TokenChain(block_tokens, seed)
        self._keys = EngineKeyChain(namespace, GROUP)

    def of(self, tokens: Sequence[int]) -> Keys:
        """Keys of all whole blocks of `tokens`, which must begin with the tokens of the last call.

        Raises:
            TokenError: a token is not in [0, 2**32).
        """
        if self._chain.extend(tokens):
            self._keys.extend(self._chain.digests)
        return self._keys.keys

    @property
    def made(self) -> Keys:
        """The keys made so far."""
        return self._keys.keys

    def begun_again(self) -> TokenKeys:
        """Keys with the same namespace and seed, of no tokens yet."""
        return TokenKeys(*self._arguments)


def without_salt(salt: str) -> bytes:
    """The seed of a chain, for an engine that numbers its salts itself.

    Raises:
        PluginCallError: the engine derives keys from a salt in a way that this cannot reproduce.
    """
    if salt:
        raise PluginCallError("this engine gives salts numbers of its own; ask of prompts without one")
    return b""
