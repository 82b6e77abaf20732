"""Which engine blocks take the pages of a promise."""

from __future__ import annotations

from collections.abc import Sequence

from flexkv.cache.base import NO_BLOCK, GroupPolicy, GroupSpec
from flexkv.cache.checks import as_block_ids
from flexkv.cache.leases import Lease
from flexkv.errors import ContractError
from flexkv.transfer.graph import BlockIds


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
