"""Computes the keys of a prompt from its token ids alone, for engines whose block hashes are a token chain."""

from __future__ import annotations

from collections.abc import Sequence

from flexkv.cache.keys import EngineKeyChain, TokenChain
from flexkv.errors import PluginCallError
from flexkv.facts.keys import Keys

GROUP = 0
"""Number of the only KV group in the engines whose adapters use this module."""


class TokenKeys:
    """Index keys of one request's blocks, computed from its tokens. The keys of earlier tokens are kept.

    Args:
        block_tokens: tokens per block.
    """

    def __init__(self, block_tokens: int, namespace: bytes, seed: bytes = b"") -> None:
        self._arguments = (block_tokens, namespace, seed)
        self._chain = TokenChain(block_tokens, seed)
        self._keys = EngineKeyChain(namespace, GROUP)

    def of(self, tokens: Sequence[int]) -> Keys:
        """Keys of all full blocks of `tokens`, which must begin with the tokens of the last call. Costs O(new blocks).

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
        """A new object with the same namespace and seed, but without any tokens."""
        return TokenKeys(*self._arguments)


def without_salt(salt: str) -> bytes:
    """The token chain's seed for a prompt without a salt (empty), in an engine that replaces each salt by a number of
    its own.

    Raises:
        PluginCallError: the prompt has a salt. Its keys cannot be computed here, because the engine's number for the
            salt is unknown.
    """
    if salt:
        raise PluginCallError("this engine gives salts numbers of its own; ask of prompts without one")
    return b""
