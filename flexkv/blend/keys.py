"""Keys of segments. A segment's keys depend only on its own tokens, not on its position or on the text before it.

Keys of segments and keys of prefixes may be in one index. Their namespaces differ, so a lookup of a segment never finds
a prefix, and a lookup of a prefix never finds a segment.
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
"""Name of the namespace field that distinguishes segments from prefixes; namespaces of prefixes do not have it."""

CALLER = "flexkv.caller"
"""Name of the namespace field that distinguishes callers who share a cache but must not share segments."""

SHAPE = "flexkv.kv"
"""Name of the namespace field that distinguishes rows of different shape or dtype, even if they have equal sizes, such
as float16 and bfloat16, or two heads of 16 elements and four heads of 8 elements.
"""


@dataclass(frozen=True, slots=True)
class SegmentKeys:
    """The keys of one segment's blocks.

    Attributes:
        whole: keys of the segment's full blocks, [blocks, 16].
        tail: key of the tokens after the last full block; None if there are none.
    """

    whole: Keys
    tail: TailCandidates | None

    @property
    def first(self) -> bytes:
        """Key of the segment's first block, which may be partial. Because keys are chained, segments that share any
        block share this key."""
        key = self.whole[0] if len(self.whole) or self.tail is None else self.tail.keys[0]
        return bytes(key)


class SegmentKeyScheme:
    """Makes keys of segments.

    Args:
        namespace: everything that separates two callers, in the same fields as for prefixes: model fingerprint, salt,
            LoRA.
        block_tokens: tokens per block.
        shape: shape of the rows that are cached under the keys.

    Attributes:
        namespace: digest of the namespace's fields, 32 bytes.

    Raises:
        KeySchemeError: a field is not bytes, str or int.
    """

    def __init__(self, namespace: Mapping[str, bytes | str | int], block_tokens: int, shape: KvShape) -> None:
        self._fields = {**namespace, SCOPE: "segment", SHAPE: str(shape)}
        self.namespace = namespace_digest(self._fields)
        self.block_tokens = block_tokens

    def keys(self, tokens: Tokens, caller: str = "") -> SegmentKeys:
        """Returns the keys of a segment.

        Args:
            caller: name of the caller; segments of different callers have different keys.

        Raises:
            TokenError: a token is not an integer in [0, 2**32).
            ConfigError: `block_tokens` is 0.
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
