"""Describes a tier's capacity to the user who sizes it, in tokens and in prompts of maximal length."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from flexkv.config.sizes import format_size
from flexkv.facts.keys import Rule
from flexkv.facts.ranks import KvGroup


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """The longest prompt that the engine accepts.

    Attributes:
        setting: the engine's name for the limit.
    """

    tokens: int
    setting: str


@dataclass(frozen=True, slots=True)
class TierCapacity:
    """The capacity of one tier of one unit.

    Attributes:
        tier: its name in the log.
        blocks: how many blocks fit.
        block_bytes: bytes of one block over all ranks, including trailers and padding.
        setting: the setting that sizes the tier.
        shares: how many times the setting's bytes are taken: once per rank, or once per disk in use.
        groups: KV groups whose pages use its slots.
    """

    tier: str
    blocks: int
    groups: tuple[KvGroup, ...]
    block_bytes: int
    setting: str
    shares: int = 1

    @property
    def tokens(self) -> int:
        """How many tokens a tier of one group has room for."""
        return self.blocks * self.groups[0].block_tokens

    @property
    def _has_whole_prompts(self) -> bool:
        """Whether a prompt takes room for all of its tokens, rather than for the pages that a hit on it needs."""
        return len(self.groups) == 1 and self.groups[0].rule is Rule.FULL

    def words(self, limit: PromptLimit | None) -> str:
        """The capacity in tokens and bytes, and in prompts if the engine reports the longest one."""
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
        """The fewest pages that a prompt of `tokens` tokens takes: those that a hit on all of it needs."""
        return sum(_pages_at_end(group, tokens) for group in self.groups)

    def needed_setting(self, limit: PromptLimit) -> int:
        """The setting's value, in bytes, with which the tier holds one prompt of maximal length."""
        return -(-self.pages_of(limit.tokens) // self.shares) * self.block_bytes

    def shortage(self, limit: PromptLimit | None) -> str:
        """The warning for a tier that cannot hold one prompt of maximal length; empty if it can."""
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
        """Logs one line that ends with `more`, and a warning if the tier is short."""
        logger.info("%s: %s%s", self.tier, self.words(limit), more)
        if words := self.shortage(limit):
            logger.warning("%s", words)


def _pages_at_end(group: KvGroup, tokens: int) -> int:
    """The most pages of a group that a hit of `tokens` tokens needs: `GroupRule::most_pages`, with a part of a block
    at the end counted as a page."""
    whole = -(-tokens // group.block_tokens)
    if group.rule is Rule.WINDOW:
        return min(whole, group.reach)
    if group.rule is Rule.CHUNK:
        return min(whole, -(-group.reach // group.block_tokens))
    return min(whole, 1) if group.rule is Rule.STATE else whole
