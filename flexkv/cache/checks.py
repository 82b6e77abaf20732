"""Checks of what callers and lanes hand to a cache manager."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import NO_BLOCK, GroupPolicy, GroupSpec, Keys, ManagerLimits, TailCandidates
from flexkv.cache.leases import Lease
from flexkv.errors import BlockRangeError, ConfigError, ContractError
from flexkv.transfer.graph import BlockIds, OpResult, OpStatus

MAX_GROUPS = 64
MAX_SLOTS = 2**30

WHOLE_OP_STATUSES = (OpStatus.CANCELLED, OpStatus.SKIPPED, OpStatus.LANE_DOWN)
"""Statuses under which no page of the op counts, whatever the result lists."""


def check_groups(groups: Sequence[GroupSpec]) -> None:
    """
    Raises:
        ConfigError: names the group, the value and what is allowed.
    """
    if not 1 <= len(groups) <= MAX_GROUPS:
        raise ConfigError(f"{len(groups)} KV groups; allowed are 1 to {MAX_GROUPS}")
    for number, spec in enumerate(groups):
        if spec.block_tokens < 1 or spec.block_tokens != groups[0].block_tokens:
            raise ConfigError(
                f"group {number}: block_tokens={spec.block_tokens}; allowed is the same positive number in every "
                f"group ({groups[0].block_tokens} in group 0)"
            )
        if not 1 <= spec.slots <= MAX_SLOTS:
            raise ConfigError(f"group {number}: slots={spec.slots}; allowed are 1 to {MAX_SLOTS}")
        windowed = spec.policy is GroupPolicy.TRAILING_WINDOW
        if windowed != (spec.window_tokens > 0):
            raise ConfigError(
                f"group {number}: window_tokens={spec.window_tokens} with policy {spec.policy.value}; a trailing "
                "window needs a positive one, the other policies none"
            )


def check_limits(limits: ManagerLimits) -> None:
    """
    Raises:
        ConfigError: names the limit, its value and what is allowed.
    """
    for name in ("ranks", "inflight_store_pages", "inflight_load_pages", "lease_s"):
        if not getattr(limits, name) > 0:
            raise ConfigError(f"{name}={getattr(limits, name)}; allowed are values above 0")
    for name in ("rest_s", "prefetch_requests"):
        if not getattr(limits, name) >= 0:
            raise ConfigError(f"{name}={getattr(limits, name)}; allowed are 0 and more")


def as_block_ids(blocks: BlockIds, place: str, least: int = 0) -> BlockIds:
    """An own copy of `blocks` as int32 [blocks].

    Raises:
        ContractError: not a one-dimensional integer array.
        BlockRangeError: a block below `least`, or one of 2**31 or more.
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
    """Per group, the engine blocks that take its leased pages, checked against the promise.

    Raises:
        ContractError: asks for more than was promised, or for a part that its policy cannot restore.
        BlockRangeError: an engine block below NO_BLOCK.
    """
    if len(blocks) != len(specs):
        raise ContractError(f"begin_load: {len(blocks)} block lists for {len(specs)} groups")
    targets = []
    for number, (spec, group) in enumerate(zip(specs, lease.groups, strict=True)):
        place = f"begin_load of request {request_id!r}, group {number}"
        target = as_block_ids(blocks[number], place, least=NO_BLOCK)
        whole = len(target) - tail
        partial_ok = spec.policy is GroupPolicy.PREFIX and not tail
        allowed = range(group.blocks + 1) if partial_ok else (group.blocks,) if tail else (0, group.blocks)
        if whole not in allowed or (tail and not group.has_tail):
            raise ContractError(
                f"begin_load: request {request_id!r} asks for {whole} blocks{' and a tail' if tail else ''} of "
                f"group {number}; promised were {group.blocks}{' and a tail' if group.has_tail else ''}"
            )
        targets.append(target)
    return targets


def good_pages(result: OpResult, pages: int, who: str = "the lane") -> NDArray[np.bool_]:
    """Which pages of an op of so many ended well, bool [pages].

    Raises:
        ContractError: the result lists pages that the op has not, or some although it says OK; names `who` sent it.
    """
    listed = np.asarray(result.failed)
    if listed.size and (
        listed.ndim != 1 or listed.dtype.kind not in "iu" or listed.min() < 0 or listed.max() >= pages
    ):
        raise ContractError(
            f"op {result.op_id}: {who} lists failed pages {listed.tolist()[:8]}; allowed are positions 0 to {pages - 1}"
        )
    if result.status is OpStatus.OK:
        if listed.size:
            raise ContractError(f"op {result.op_id}: {who} says OK and lists {listed.size} failed pages")
        return np.ones(pages, np.bool_)
    good = np.zeros(pages, np.bool_)
    # A failure that names no page is taken as a failure of all: never a page too few.
    if result.status not in WHOLE_OP_STATUSES and listed.size:
        good[:] = True
        good[listed] = False
    return good


def check_lookup(
    groups: int, keys: Sequence[Keys], start_block: int, tail: Sequence[TailCandidates | None] | None
) -> None:
    """
    Raises:
        ContractError: not one element a group.
        BlockRangeError: a negative start block.
    """
    if len(keys) != groups or (tail is not None and len(tail) != groups):
        raise ContractError(
            f"match: {len(keys)} key arrays and {'no' if tail is None else len(tail)} tails for {groups} groups"
        )
    if start_block < 0:
        raise BlockRangeError(f"match: start block {start_block}; allowed are 0 and more")
