"""What tiers that do not know their pages by themselves are asked for requests: each request asks a tier once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from flexkv.c_ext import FoundLengths
from flexkv.cache.base import NO_ENTRIES, GroupSpec, OpRole, TailCandidates, TierId
from flexkv.cache.ledger.ops import ProbeOp
from flexkv.cache.promise.fetch_choice import FetchChoice
from flexkv.cache.promise.waits import FetchWaits
from flexkv.cache.tiers.tables import CacheTables
from flexkv.facts.keys import Keys, Rule
from flexkv.transfer.graph import NO_BLOCKS, NO_PLACES, OpKind, Priority, TransferOp


class Questions:
    """Of one manager. What is asked is what no tier of this machine has; who asked waits for the answers.

    Args:
        tables: of the manager.
        alignment_tokens: every hit is a multiple of it.
        epoch: the manager's.

    Attributes:
        any: some tier has to be asked.
    """

    def __init__(
        self,
        specs: Sequence[GroupSpec],
        tables: CacheTables,
        waits: FetchWaits,
        choice: FetchChoice,
        alignment_tokens: int,
        epoch: Callable[[], int],
    ) -> None:
        self._specs = specs
        self._tiers = tables.tiers
        self._ops = tables.ops
        self._requests = tables.requests
        self._waits = waits
        self._choice = choice
        self._alignment_tokens = alignment_tokens
        self._epoch = epoch
        self._probers = [TierId(n) for n, tier in enumerate(tables.tiers) if tier.prober is not None]
        self.any = bool(self._probers)

    def for_blocks(
        self,
        request_id: str,
        keys: Sequence[Keys],
        start_tokens: int,
        end_block: int,
        usable: Sequence[TierId],
    ) -> int:
        """Asks `usable` tiers for the blocks from `end_block` on, of groups that restore the same blocks together; the
        answers to wait for."""
        blocks = min(map(len, keys))
        if blocks <= end_block:
            return 0
        asked = [of_group[end_block:blocks] for of_group in keys]
        tokens = (blocks - end_block) * self._specs[0].block_tokens
        return self._ask(request_id, keys, start_tokens, asked, tokens, usable)

    def for_boundary(
        self,
        request_id: str,
        keys: Sequence[Keys],
        start_tokens: int,
        end_tokens: int,
        found: FoundLengths,
        usable: Sequence[TierId],
    ) -> int:
        """The same for groups that need other pages each: of full attention what follows the pages that were found, of
        the others all up to `end_tokens`, as any may end a hit."""
        if not self._probers or found.cut:
            return 0
        end = end_tokens - end_tokens % self._alignment_tokens
        reached = found.lengths[0] if found.lengths else start_tokens
        if end <= reached:
            return 0
        asked = []
        for of_group, spec in zip(keys, self._specs, strict=True):
            first = max(start_tokens, found.shared_tokens) if spec.rule is Rule.FULL else start_tokens
            asked.append(of_group[first // spec.block_tokens : end // spec.block_tokens])
        return self._ask(request_id, keys, start_tokens, asked, end - reached, usable)

    def for_tail(
        self,
        request_id: str,
        tail: Sequence[TailCandidates | None],
        end_block: int,
        usable: Sequence[TierId],
    ) -> int:
        """The same for what may follow the last whole block."""
        candidates = [each for each in tail if each is not None and each.base_block == end_block]
        if not self._probers or len(candidates) < len(tail):
            return 0
        keys, tokens = [each.keys for each in candidates], candidates[0].tokens
        if not len(tokens) or any(not np.array_equal(each.tokens, tokens) for each in candidates):
            return 0
        start_tokens = end_block * self._specs[0].block_tokens
        return self._ask(request_id, keys, start_tokens, keys, int(tokens.max()), usable, tokens)

    def _ask(
        self,
        request_id: str,
        keys: Sequence[Keys],
        start_tokens: int,
        asked: Sequence[Keys],
        saved_tokens: int,
        usable: Sequence[TierId],
        tail_tokens: NDArray[np.int32] | None = None,
    ) -> int:
        """
        Args:
            keys, start_tokens: what the answer is for.
            saved_tokens: if all that is asked for is there.
            tail_tokens: of each of the asked keys, where they are of a tail.
        """
        waiting, is_tail = 0, tail_tokens is not None
        for tier in self._probers:
            prober = self._tiers[tier].prober
            if prober is None or tier not in usable:
                continue
            former = self._requests.probe_of(request_id, tier, is_tail)
            if former is not None:
                probe = self._ops.awaited(former)
                if not isinstance(probe, ProbeOp):
                    continue  # answered: what there is was found
            else:
                if not self._choice.ask_worth(tier, sum(map(len, asked)), saved_tokens):
                    continue
                op_id = self._ops.next_id()
                if not prober.ask(op_id, asked, tail_tokens):
                    continue
                probe = ProbeOp(
                    plan=TransferOp(op_id, OpKind.DISK_READ, 0, Priority.LOAD, NO_BLOCKS, NO_PLACES),
                    role=OpRole.PROBE,
                    tier=tier,
                    entries=NO_ENTRIES,
                    epoch=self._epoch(),
                    keys=keys,
                    start_tokens=start_tokens,
                )
                self._ops.add(probe)
                self._requests.probed(request_id, tier, is_tail, op_id)
            self._waits.join_probe(request_id, probe, prober.probe_s)
            waiting += 1
        return waiting
