"""Keys of segments. They depend only on a segment's own tokens, not on its position or on the text before it.

They are in the same index as keys of prefixes. The namespaces differ, so neither kind is found in place of the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flexkv.blend.base import KvShape, Tokens
from flexkv.cache.base import TailCandidates
from flexkv.cache.keys import EngineKeyChain, TokenChain, namespace_digest, tail_key
from flexkv.facts.keys import Keys

GROUP = 0

SCOPE = "flexkv.scope"
"""The namespace field that distinguishes segments from prefixes, which do not have it."""

CALLER = "flexkv.caller"
"""The namespace field that distinguishes callers who share one cache and no segment."""

SHAPE = "flexkv.kv"
"""The namespace field that distinguishes rows of different kinds, even of equal size: float16 and bfloat16, two heads
of 16 and four of 8.
"""


@dataclass(frozen=True, slots=True)
class SegmentKeys:
    """The keys of one segment's blocks.

    Attributes:
        whole: keys of its whole blocks, [blocks, 16].
        tail: keys of the tokens after them, if there are any.
    """

    whole: Keys
    tail: TailCandidates | None

    @property
    def first(self) -> bytes:
        """Key of its first block, whole or not. Segments that share any block share this one, because keys are
        chained."""
        key = self.whole[0] if len(self.whole) or self.tail is None else self.tail.keys[0]
        return bytes(key)


class SegmentKeyScheme:
    """Makes keys of segments.

    Args:
        namespace: everything that separates two callers: model fingerprint, salt, LoRA. The same fields as for
            prefixes.
        shape: shape of the rows under the keys.

    Attributes:
        namespace: digest of the fields, 32 bytes.

    Raises:
        KeySchemeError: a field is neither bytes, str nor int. ConfigError: `block_tokens` is 0.
    """

    def __init__(self, namespace: Mapping[str, bytes | str | int], block_tokens: int, shape: KvShape) -> None:
        self._fields = {**namespace, SCOPE: "segment", SHAPE: str(shape)}
        self.namespace = namespace_digest(self._fields)
        self.block_tokens = block_tokens

    def keys(self, tokens: Tokens, caller: str = "") -> SegmentKeys:
        """
        Args:
            caller: segments of different callers have different keys.

        Raises:
            TokenError: a token is not an integer in [0, 2**32).
        """
        namespace = namespace_digest({**self._fields, CALLER: caller}) if caller else self.namespace
        chain = TokenChain(self.block_tokens)
        chain.extend(tokens)
        whole = EngineKeyChain(namespace, GROUP)
        whole.extend(chain.digests)
        blocks = len(whole)
        rest = tokens[blocks * self.block_tokens :]
        if not len(rest):
            return SegmentKeys(whole.keys, None)
        parent = chain.digests[-1].tobytes() if blocks else None
        key = tail_key(namespace, GROUP, parent, b"", rest, blocks)
        return SegmentKeys(whole.keys, TailCandidates(key, np.array([len(rest)], np.int32), blocks))
