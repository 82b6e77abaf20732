"""Checks of the arguments that callers pass to a cache manager."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from flexkv.cache.base import NO_BLOCK, GroupSpec, ManagerLimits, TailCandidates
from flexkv.cache.ledger.leases import Lease
from flexkv.errors import BlockRangeError, ConfigError, ContractError
from flexkv.facts.keys import Keys, Rule
from flexkv.transfer.graph import BlockIds

MAX_GROUPS = 64
MAX_SLOTS = 2**30
MAX_BLOCK_TOKENS = 2**20
MAX_REACH = 2**31 - 1
MAX_ALIGNMENT = 2**40


def check_groups(groups: Sequence[GroupSpec]) -> None:
    """Checks the KV groups of a manager.

    Raises:
        ConfigError: a group is not valid; the message names the group, the value and the allowed values.
    """
    if not 1 <= len(groups) <= MAX_GROUPS:
        raise ConfigError(f"{len(groups)} KV groups; allowed are 1 to {MAX_GROUPS}")
    for number, spec in enumerate(groups):
        if not 1 <= spec.block_tokens <= MAX_BLOCK_TOKENS:
            raise ConfigError(
                f"group {number}: block_tokens={spec.block_tokens}; allowed are 1 to {MAX_BLOCK_TOKENS}"
            )
        if not 1 <= spec.slots <= MAX_SLOTS:
            raise ConfigError(f"group {number}: slots={spec.slots}; allowed are 1 to {MAX_SLOTS}")
        if spec.shares is not None:
            owner = groups[spec.shares] if 0 <= spec.shares < number else None
            if owner is None or owner.shares is not None or owner.slots != spec.slots:
                raise ConfigError(
                    f"group {number} with {spec.slots} slots: shares={spec.shares}; allowed is the number of a group "
                    "before it that has as many slots, all its own"
                )
        reaches = spec.rule in (Rule.WINDOW, Rule.CHUNK)
        if not (0 < spec.reach <= MAX_REACH if reaches else spec.reach == 0):
            raise ConfigError(
                f"group {number}: reach={spec.reach} with rule {spec.rule.value}; a window and a chunk need one of "
                f"1 to {MAX_REACH}, the other rules none"
            )


def check_alignment(groups: Sequence[GroupSpec], alignment_tokens: int | None) -> int:
    """Returns the alignment of hits: the number of tokens of every hit is a multiple of this number.

    Args:
        alignment_tokens: the requested alignment; None for the least common multiple of the block sizes.

    Raises:
        ConfigError: the alignment is not a multiple of every group's block size, or is too large; the message names
            the smallest valid alignment.
    """
    least = math.lcm(*(spec.block_tokens for spec in groups))
    alignment = least if alignment_tokens is None else alignment_tokens
    if alignment < 1 or alignment % least or alignment > MAX_ALIGNMENT:
        raise ConfigError(
            f"hits aligned to {alignment} tokens; allowed are multiples of {least} up to {MAX_ALIGNMENT}, whole blocks "
            "of every group"
        )
    return alignment


def check_limits(limits: ManagerLimits) -> None:
    """Checks the limits of a manager.

    Raises:
        ConfigError: a limit is not valid; the message names the limit, its value and the allowed values.
    """
    for name in ("ranks", "inflight_store_pages", "inflight_load_pages", "lease_s"):
        if not getattr(limits, name) > 0:
            raise ConfigError(f"{name}={getattr(limits, name)}; allowed are values above 0")
    for name in ("rest_s", "prefetch_requests"):
        if not getattr(limits, name) >= 0:
            raise ConfigError(f"{name}={getattr(limits, name)}; allowed are 0 and more")


def as_block_ids(blocks: BlockIds, place: str, least: int = 0) -> BlockIds:
    """Returns a copy of `blocks` as int32 [blocks].

    Args:
        place: name of the call that got the blocks, for error messages.

    Raises:
        ContractError: `blocks` is not a one-dimensional integer array.
        BlockRangeError: a block number is below `least`, or 2**31 or more.
    """
    given = np.asarray(blocks)
    if not given.size:
        return np.empty(0, np.int32)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise ContractError(
            f"{place}: engine blocks are {given.dtype} of shape {given.shape}; needed are integers [n]"
        )
    if given.min() < least or (given.dtype != np.int32 and given.max() >= 2**31):
        raise BlockRangeError(
            f"{place}: engine blocks from {given.min()} to {given.max()}; allowed are {least} to 2**31 - 1"
        )
    return given.astype(np.int32)


def load_targets(
    specs: Sequence[GroupSpec], request_id: str, lease: Lease, blocks: Sequence[BlockIds], tail: bool
) -> list[BlockIds]:
    """Checks a load's target engine blocks against the pages that the lease promises. Returns the blocks by group.

    Raises:
        ContractError: there are more blocks than were promised, or a number of blocks that the group's rule does not
            allow.
        BlockRangeError: an engine block number is below NO_BLOCK, or 2**31 or more.
    """
    if len(blocks) != len(specs):
        raise ContractError(f"begin_load: {len(blocks)} block lists for {len(specs)} groups")
    targets = []
    for number, (spec, group) in enumerate(zip(specs, lease.groups, strict=True)):
        place = f"begin_load of request {request_id!r}, group {number}"
        target = as_block_ids(blocks[number], place, least=NO_BLOCK)
        whole = len(target) - tail
        partial_ok = spec.rule is Rule.FULL and not tail
        allowed = range(group.blocks + 1) if partial_ok else (group.blocks,) if tail else (0, group.blocks)
        if whole not in allowed or (tail and not group.has_tail):
            raise ContractError(
                f"begin_load: request {request_id!r} asks for {whole} blocks{' and a tail' if tail else ''} of "
                f"group {number}; promised were {group.blocks}{' and a tail' if group.has_tail else ''}"
            )
        targets.append(target)
    return targets


def check_lookup(
    specs: Sequence[GroupSpec],
    keys: Sequence[Keys],
    start_tokens: int,
    tail: Sequence[TailCandidates | None] | None,
) -> None:
    """Checks the arguments of a lookup; see `CacheManager.match`.

    Raises:
        ContractError: `keys` or `tail` do not have one element per group, the start is within a block, or there is a
            tail for a group that cannot have one.
        BlockRangeError: the start is negative.
    """
    groups = len(specs)
    if len(keys) != groups or (tail is not None and len(tail) != groups):
        raise ContractError(
            f"match: {len(keys)} key arrays and {'no' if tail is None else len(tail)} tails for {groups} groups"
        )
    if start_tokens < 0:
        raise BlockRangeError(f"match: start token {start_tokens}; allowed are 0 and more")
    for number, spec in enumerate(specs):
        if start_tokens % spec.block_tokens:
            raise ContractError(
                f"match: start token {start_tokens} lies within a block of group {number}, which has "
                f"{spec.block_tokens} tokens"
            )
        if tail is None:
            continue
        if spec.rule is not Rule.FULL or spec.block_tokens != specs[0].block_tokens:
            raise ContractError(
                f"match: tails, and group {number} has rule {spec.rule.value} and blocks of {spec.block_tokens} "
                "tokens; they are for groups of rule full with blocks of one size"
            )
