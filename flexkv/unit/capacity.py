"""Describes a tier's capacity for the log, in tokens and in prompts of maximal length."""

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
        tokens: length of that prompt in tokens.
        setting: name of the engine's setting that limits prompts.
    """

    tokens: int
    setting: str


@dataclass(frozen=True, slots=True)
class TierCapacity:
    """The capacity of one tier of one unit.

    Attributes:
        tier: the tier's name in the log.
        blocks: number of blocks that the tier can hold.
        block_bytes: size of one block in bytes on all ranks together, including trailer and padding.
        setting: name of the setting that determines the tier's size.
        shares: number by which the setting's bytes are multiplied to get the tier's size: the number of ranks if the
            setting is per rank, the number of disks in use if it is per disk, otherwise 1.
        groups: KV groups whose pages use the tier's slots.
    """

    tier: str
    blocks: int
    groups: tuple[KvGroup, ...]
    block_bytes: int
    setting: str
    shares: int = 1

    @property
    def tokens(self) -> int:
        """The number of tokens that the tier holds if it serves only one KV group."""
        return self.blocks * self.groups[0].block_tokens

    @property
    def _has_whole_prompts(self) -> bool:
        """Whether a hit on a prompt needs the pages of all its tokens. Windows, chunks and states need fewer."""
        return len(self.groups) == 1 and self.groups[0].rule is Rule.FULL

    def words(self, limit: PromptLimit | None) -> str:
        """Returns the capacity in tokens and bytes. If `limit` is not None, adds the capacity in prompts of maximal
        length.
        """
        size = format_size(self.blocks * self.block_bytes)
        if len(self.groups) > 1:
            # The number of tokens that the pages of several groups hold depends on the prompts' lengths and shared
            # prefixes.
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
        """The number of pages that a hit on a complete prompt of `tokens` tokens needs, over all groups."""
        return sum(_pages_at_end(group, tokens) for group in self.groups)

    def needed_setting(self, limit: PromptLimit) -> int:
        """The smallest value of the tier's setting, in bytes, for which the tier holds one prompt of maximal length."""
        return -(-self.pages_of(limit.tokens) // self.shares) * self.block_bytes

    def shortage(self, limit: PromptLimit | None) -> str:
        """Returns a warning if the tier cannot hold one prompt of maximal length; empty if it can, or if `limit` is
        None.
        """
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
        """Logs the capacity in one line that ends with `more`. Adds a warning if the tier is too small for one prompt
        of maximal length."""
        logger.info("%s: %s%s", self.tier, self.words(limit), more)
        if words := self.shortage(limit):
            logger.warning("%s", words)


def _pages_at_end(group: KvGroup, tokens: int) -> int:
    """The maximum number of pages of a group that a hit of `tokens` tokens needs. Computes the same as
    `GroupRule::most_pages` in `csrc/index/group_rule.h`, but counts an incomplete last block as a page."""
    whole = -(-tokens // group.block_tokens)
    if group.rule is Rule.WINDOW:
        return min(whole, group.reach)
    if group.rule is Rule.CHUNK:
        return min(whole, -(-group.reach // group.block_tokens))
    return min(whole, 1) if group.rule is Rule.STATE else whole
