"""Finds and counts the reasons why lookups promise fewer tokens than were asked for. The reasons are the members of
`MissReason`."""

from __future__ import annotations

from collections.abc import Sequence

from flexkv.cache.ledger.leases import Lease
from flexkv.cache.promise.ask import Ask, Looked
from flexkv.cache.promise.lookup import Lookup
from flexkv.cache.tiers.contract import Tier
from flexkv.cache.tiers.tables import CacheTables
from flexkv.facts.keys import Keys
from flexkv.observe import MissReason


class Misses:
    """Records the reason of each lookup's miss, and counts it when the engine acts on the lookup.

    Args:
        lookup: the object that made the lookups.
    """

    def __init__(self, tables: CacheTables, lookup: Lookup) -> None:
        self._tables = tables
        self._lookup = lookup
        self._sizes = [spec.block_tokens for spec in tables.specs]

    def note(
        self, request_id: str, keys: Sequence[Keys], looked: Looked, ask: Ask | None, asked_tokens: int
    ) -> MissReason | None:
        """Records why no more than the lease is promised, so that `count` can count the reason later.

        Args:
            keys: per group, the keys that the engine asked for.
            ask: the lookup's arguments; None if the request's former lease already has all pages asked for.
            asked_tokens: number of tokens that the engine asked for.

        Returns:
            The reason; None if everything is promised or more may come.
        """
        requests, lease = self._tables.requests, looked.lease
        missing = (asked_tokens - lease.tokens) // self._sizes[0]
        if missing <= 0:
            requests.misses.pop(request_id, None)
            return None
        # If the engine acts on this lookup although more may come, it did not wait, so the reason is LATE.
        is_open = bool(looked.fetches or looked.awaited)
        reason = MissReason.LATE if is_open else self._reason(request_id, keys, lease, looked, ask)
        requests.note_miss(request_id, reason, missing)
        return None if is_open else reason

    def count(self, request_id: str) -> None:
        """Counts the recorded miss of the request's last lookup. Called when the engine acts on the lookup."""
        noted = self._tables.requests.misses.pop(request_id, None)
        if noted is not None:
            reason, blocks = noted
            missed = self._tables.counts.missed
            missed[reason] = missed.get(reason, 0) + blocks

    def _reason(
        self, request_id: str, keys: Sequence[Keys], lease: Lease, looked: Looked, ask: Ask | None
    ) -> MissReason:
        end = lease.start_tokens + lease.tokens
        if lease.cut:
            return MissReason.QUEUE_FULL
        # `ask.bound`, which says why keys were left out of the lookup, counts only if the promise ends where its keys
        # end.
        if ask is not None and ask.bound is not None and self._lookup.may_end_at(ask, end):
            return ask.bound
        if looked.left_out is not None:
            return looked.left_out
        skipped = self._tables.requests.skipped(request_id)
        if skipped:
            return next(iter(skipped.values()))
        blocks = [
            of_group[end // size : end // size + 1]
            for of_group, size in zip(keys, self._sizes, strict=True)
            if end // size < len(of_group)
        ]
        if any(self._tables.hub.expired.holds(block) for block in blocks):
            return MissReason.EXPIRED
        if ask is not None and any(self._has(tier, keys, end) for tier in self._excluded(ask)):
            return MissReason.ASKED
        return MissReason.ABSENT

    def _excluded(self, ask: Ask) -> list[Tier]:
        """Returns the tiers in use that the request's settings exclude."""
        labels = ask.settings.tiers
        if labels is None:
            return []
        behind = [self._tables.tiers[number] for number in self._lookup.behind]
        return [tier for tier in behind if tier.in_use and tier.facts.label not in labels]

    def _has(self, tier: Tier, keys: Sequence[Keys], tokens: int) -> bool:
        """Whether a tier has, for every group, the block after the request's first `tokens` tokens."""
        return all(
            len(tier.leading(group, of_group[tokens // size : tokens // size + 1]))
            for group, (of_group, size) in enumerate(zip(keys, self._sizes, strict=True))
        )
