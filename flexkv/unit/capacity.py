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
        groups: KV groups whose pages take its slots.
    """

    tier: str
    blocks: int
    groups: tuple[KvGroup, ...]
    block_bytes: int
    setting: str
    shares: int = 1

    @property
    def tokens(self) -> int:
        """Of a tier of one group."""
        return self.blocks * self.groups[0].block_tokens

    @property
    def _has_whole_prompts(self) -> bool:
        """Whether what a prompt takes is its tokens, and not what a hit on it needs."""
        return len(self.groups) == 1 and self.groups[0].rule is Rule.FULL

    def words(self, limit: PromptLimit | None) -> str:
        """Tokens, bytes, and prompts where the engine says how long one may be."""
        size = format_size(self.blocks * self.block_bytes)
        if len(self.groups) > 1:
            # How many tokens they hold depends on how prompts share pages.
            words = f"{self.blocks} pages of {len(self.groups)} KV groups, {size}"
        else:
            block_tokens = self.groups[0].block_tokens
            words = f"{self.tokens} tokens ({self.blocks} blocks of {block_tokens} tokens, {size})"
        if limit is None:
            return words
        whole = self._has_whole_prompts
        prompts = self.tokens / limit.tokens if whole else self.blocks / self.pages_of(limit.tokens)
        return f"{words}, {prompts:.1f} prompts of {limit.setting} ({limit.tokens} tokens)"

    def pages_of(self, tokens: int) -> int:
        """Pages that a prompt of so many tokens takes at least: those that a hit on all of it needs."""
        return sum(_pages_at_end(group, tokens) for group in self.groups)

    def needed_setting(self, limit: PromptLimit) -> int:
        """Bytes of the setting that hold one prompt of the longest kind."""
        return -(-self.pages_of(limit.tokens) // self.shares) * self.block_bytes

    def shortage(self, limit: PromptLimit | None) -> str:
        """What is to be said of a tier that does not hold one prompt of the longest kind; empty where it does."""
        if limit is None or self.blocks >= self.pages_of(limit.tokens):
            return ""
        needed = self.needed_setting(limit)
        holds = f"{self.tokens} tokens" if self._has_whole_prompts else f"{self.blocks} pages"
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
