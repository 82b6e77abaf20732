"""What a tier holds in words that mean something to whoever sizes it: tokens, and prompts of the longest kind."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from flexkv.cache.base import Rule
from flexkv.config.sizes import format_size
from flexkv.unit.ranks import KvGroup


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
        block_bytes: of one block with everything that is stored beside it, over all ranks.
        setting: that sizes the tier.
        shares: how often the setting's bytes are taken: ranks, or disks in use.
        others: KV groups besides the first, whose pages take slots as well.
    """

    tier: str
    blocks: int
    block_tokens: int
    block_bytes: int
    setting: str
    shares: int = 1
    others: tuple[KvGroup, ...] = ()

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_tokens

    def words(self, limit: PromptLimit | None) -> str:
        """Tokens, bytes, and prompts where the engine says how long one may be."""
        size = format_size(self.blocks * self.block_bytes)
        if self.others:
            # How many tokens they hold depends on how prompts share pages.
            words = f"{self.blocks} pages of {1 + len(self.others)} KV groups, {size}"
        else:
            words = f"{self.tokens} tokens ({self.blocks} blocks of {self.block_tokens} tokens, {size})"
        if limit is None:
            return words
        prompts = self.blocks / self.pages_of(limit.tokens) if self.others else self.tokens / limit.tokens
        return f"{words}, {prompts:.1f} prompts of {limit.setting} ({limit.tokens} tokens)"

    def pages_of(self, tokens: int) -> int:
        """Pages that a prompt of so many tokens takes at least: those that a hit on all of it needs."""
        return -(-tokens // self.block_tokens) + sum(_pages_at_end(group, tokens) for group in self.others)

    def needed_setting(self, limit: PromptLimit) -> int:
        """Bytes of the setting that hold one prompt of the longest kind."""
        return -(-self.pages_of(limit.tokens) // self.shares) * self.block_bytes

    def shortage(self, limit: PromptLimit | None) -> str:
        """What is to be said of a tier that does not hold one prompt of the longest kind; empty where it does."""
        if limit is None or self.blocks >= self.pages_of(limit.tokens):
            return ""
        needed = self.needed_setting(limit)
        holds = f"{self.blocks} pages" if self.others else f"{self.tokens} tokens"
        return (
            f"the {self.tier} holds {holds}, less than one prompt of {limit.setting} ({limit.tokens} "
            "tokens): of a longer prompt some or all is evicted before it comes again. For one prompt set "
            f"{self.setting} to {needed} ({format_size(needed)}) or more"
        )

    def log(self, logger: logging.Logger, limit: PromptLimit | None, more: str) -> None:
        """One line with `more` at its end, and a warning where the tier is short."""
        logger.info("%s: %s%s", self.tier, self.words(limit), more)
        if words := self.shortage(limit):
            logger.warning("%s", words)


def _pages_at_end(group: KvGroup, tokens: int) -> int:
    """Pages of a group that a hit of so many tokens needs at most: `GroupRule::most_pages`, with a part of a block at
    the end counted as a page."""
    whole = -(-tokens // group.block_tokens)
    if group.rule is Rule.WINDOW:
        return min(whole, group.reach)
    if group.rule is Rule.CHUNK:
        return min(whole, -(-group.reach // group.block_tokens))
    return min(whole, 1) if group.rule is Rule.STATE else whole
