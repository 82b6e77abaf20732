"""Asks tiers which pages they have, if this unit has no index of their pages. For each request, such a tier is asked
once about whole blocks and once about a tail.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flexkv.c_ext import FoundLengths
from flexkv.cache.base import NO_ENTRIES, OpRole, TailCandidates, TierId
from flexkv.cache.ledger.ops import ProbeOp
from flexkv.cache.promise.ask import Ask
from flexkv.cache.promise.fetch_choice import FetchChoice
from flexkv.cache.promise.waits import FetchWaits
from flexkv.cache.tiers.tables import CacheTables
from flexkv.facts.keys import Keys, Rule
from flexkv.transfer.graph import NO_BLOCKS, NO_PLACES, OpId, OpKind, Priority, TransferOp


class Questions:
    """Asks tiers about pages that a lookup did not find, and makes the request wait for the answers.

    Args:
        choice: decides whether pages would arrive sooner than the engine computes them.
        alignment_tokens: the number of tokens of every hit is a multiple of this number.

    Attributes:
        any: whether there is a tier that must be asked which pages it has.
    """

    def __init__(
        self, tables: CacheTables, waits: FetchWaits, choice: FetchChoice, alignment_tokens: int
    ) -> None:
        self._tables = tables
        self._waits = waits
        self._choice = choice
        self._alignment_tokens = alignment_tokens
        self._probers = [TierId(n) for n, tier in enumerate(tables.tiers) if tier.prober is not None]
        self.any = bool(self._probers)

    def for_blocks(self, ask: Ask, end_block: int) -> int:
        """Asks tiers about the blocks from `end_block` on. Used in units whose groups all need the same blocks. Returns
        the number of answers to wait for."""
        blocks = min(map(len, ask.keys))
        if blocks <= end_block:
            return 0
        asked = [of_group[end_block:blocks] for of_group in ask.keys]
        return self._ask(ask, asked, (blocks - end_block) * self._tables.specs[0].block_tokens)

    def for_boundary(self, ask: Ask, end_tokens: int, found: FoundLengths) -> int:
        """Asks tiers about pages before `end_tokens`. Used in units whose groups need different pages. For a FULL
        group, only the pages after those that were found are asked about. For any other group, all pages are asked
        about, because a hit may end at each of them. Returns the number of answers to wait for."""
        if not self._probers or found.cut:
            return 0
        end = end_tokens - end_tokens % self._alignment_tokens
        reached = found.lengths[0] if found.lengths else ask.start_tokens
        if end <= reached:
            return 0
        asked = []
        for of_group, spec in zip(ask.keys, self._tables.specs, strict=True):
            full = spec.rule is Rule.FULL
            first = max(ask.start_tokens, found.shared_tokens) if full else ask.start_tokens
            asked.append(of_group[first // spec.block_tokens : end // spec.block_tokens])
        return self._ask(ask, asked, end - reached)

    def for_tail(self, ask: Ask, tail: Sequence[TailCandidates | None], end_block: int) -> int:
        """Asks tiers about the candidates of the tail, the partial block with index `end_block`. Returns the number of
        answers to wait for."""
        candidates = [each for each in tail if each is not None and each.base_block == end_block]
        if not self._probers or len(candidates) < len(tail):
            return 0
        keys, tokens = [each.keys for each in candidates], candidates[0].tokens
        if not len(tokens) or any(not np.array_equal(each.tokens, tokens) for each in candidates):
            return 0
        start_tokens = end_block * self._tables.specs[0].block_tokens
        of_tail = ask._replace(keys=keys, start_tokens=start_tokens)
        return self._ask(of_tail, keys, int(tokens.max()), tokens)

    def _ask(
        self,
        ask: Ask,
        asked: Sequence[Keys],
        saved_tokens: int,
        tail_tokens: NDArray[np.int32] | None = None,
    ) -> int:
        """Asks each tier that has not been asked yet for this request about the keys `asked`. Returns the number of
        answers to wait for, including answers to earlier questions of this request.

        Args:
            ask: the lookup that needs the answers.
            asked: per group, the keys to ask about.
            saved_tokens: number of tokens that the engine need not compute if a tier has all these pages.
            tail_tokens: number of valid tokens of each key if the keys are candidates of a tail; None for whole blocks.
        """
        waiting, is_tail = 0, tail_tokens is not None
        requests, ops = self._tables.requests, self._tables.ops
        for tier in self._probers:
            prober = self._tables.tiers[tier].prober
            if prober is None or tier not in ask.tiers:
                continue
            former = requests.probe_of(ask.request_id, tier, is_tail)
            if former is not None:
                probe = ops.awaited(former)
                if not isinstance(probe, ProbeOp):
                    continue  # The tier has answered, so the lookup has already found the tier's pages.
            else:
                if not self._choice.ask_worth(tier, sum(map(len, asked)), saved_tokens):
                    continue
                op_id = ops.next_id()
                if not prober.ask(op_id, asked, tail_tokens):
                    continue
                probe = self._enter(ask, tier, op_id)
                requests.probed(ask.request_id, tier, is_tail, op_id)
            self._waits.join_probe(ask.request_id, probe, prober.probe_s)
            waiting += 1
        return waiting

    def _enter(self, ask: Ask, tier: TierId, op_id: OpId) -> ProbeOp:
        """Records that a question to a tier is in flight."""
        probe = ProbeOp(
            plan=TransferOp(op_id, OpKind.DISK_READ, 0, Priority.LOAD, NO_BLOCKS, NO_PLACES),
            role=OpRole.PROBE,
            tier=tier,
            entries=NO_ENTRIES,
            epoch=self._tables.epoch,
            keys=ask.keys,
            start_tokens=ask.start_tokens,
            settings=ask.settings,
        )
        self._tables.ops.add(probe)
        return probe
