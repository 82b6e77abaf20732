"""What a tier holds in words that mean something to whoever sizes it: tokens, and prompts of the longest kind."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from flexkv.config.sizes import format_size


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """The longest prompt that the engine takes.

    Attributes:
        setting: the engine's name for it.
    """

    tokens: int
    setting: str


@dataclass(frozen=True, slots=True)
class TierCapacity:
    """Of one tier of one unit.

    Attributes:
        tier: its name in the log.
        blocks: that it has room for.
        block_bytes: of one with everything that is stored beside it, over all ranks.
        setting: that sizes the tier.
        shares: how often the setting's bytes are taken: ranks, or disks in use.
    """

    tier: str
    blocks: int
    block_tokens: int
    block_bytes: int
    setting: str
    shares: int = 1

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_tokens

    def words(self, limit: PromptLimit | None) -> str:
        """Tokens, bytes, and prompts where the engine says how long one may be."""
        size = format_size(self.blocks * self.block_bytes)
        words = f"{self.tokens} tokens ({self.blocks} blocks of {self.block_tokens} tokens, {size})"
        if limit is None:
            return words
        return f"{words}, {self.tokens / limit.tokens:.1f} prompts of {limit.setting} ({limit.tokens} tokens)"

    def needed_setting(self, limit: PromptLimit) -> int:
        """Bytes of the setting that hold one prompt of the longest kind."""
        blocks = -(-limit.tokens // self.block_tokens)
        return -(-blocks // self.shares) * self.block_bytes

    def shortage(self, limit: PromptLimit | None) -> str:
        """What is to be said of a tier that does not hold one prompt of the longest kind; empty where it does."""
        if limit is None or self.tokens >= limit.tokens:
            return ""
        needed = self.needed_setting(limit)
        return (
            f"the {self.tier} holds {self.tokens} tokens, less than one prompt of {limit.setting} ({limit.tokens} "
            "tokens): of a longer prompt some or all is evicted before it comes again. For one prompt set "
            f"{self.setting} to {needed} ({format_size(needed)}) or more"
        )

    def log(self, logger: logging.Logger, limit: PromptLimit | None, more: str) -> None:
        """One line with `more` at its end, and a warning where the tier is short."""
        logger.info("%s: %s%s", self.tier, self.words(limit), more)
        if words := self.shortage(limit):
            logger.warning("%s", words)
