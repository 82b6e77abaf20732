"""What a cache manager counted since it was made."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from flexkv.observe import MissReason


@dataclass(slots=True)
class ManagerStats:
    """Running totals of one manager, in blocks unless they say otherwise.

    Attributes:
        lookups: calls of `match`.
        hit_blocks: whole blocks promised, counted once for all groups.
        miss_blocks: whole blocks requested and not promised.
        tail_hits: partial tails promised.
        loaded_pages: pages that every rank loaded.
        failed_load_pages: pages that failed to load on some rank.
        stored_pages: pages published.
        failed_store_pages: pages that failed to be stored on some rank.
        discarded_pages: pages written successfully and not published: revoked, forgotten, or of an old epoch.
        busy_pages: offered pages that were not stored, because there was no slot or no queue entry.
        evicted_blocks: blocks evicted to make room.
        expired_blocks: blocks that left host memory because their time to live was over.
        forgotten_blocks: blocks made misses by `forget` or a failed load.
        expired_leases: lookups whose lease expired before a load.
        cut_promises: lookups whose promise was cut because the load queue was full.
        resets: calls of `reset`.
        streamed_pages: pages whose load began while they were still being fetched to host memory.
        missed: whole blocks that lookups did not promise, by reason; counted once per lookup that the engine acted on.
    """

    lookups: int = 0
    hit_blocks: int = 0
    miss_blocks: int = 0
    tail_hits: int = 0
    loaded_pages: int = 0
    failed_load_pages: int = 0
    stored_pages: int = 0
    failed_store_pages: int = 0
    discarded_pages: int = 0
    busy_pages: int = 0
    evicted_blocks: int = 0
    expired_blocks: int = 0
    forgotten_blocks: int = 0
    expired_leases: int = 0
    cut_promises: int = 0
    resets: int = 0
    streamed_pages: int = 0
    missed: dict[MissReason, int] = field(default_factory=dict)

    def copy(self) -> ManagerStats:
        """A copy of the current totals."""
        return replace(self, missed=dict(self.missed))

    def add_lookup(self, asked: int, promised: int, tail: bool, cut: bool) -> None:
        """Counts a lookup of `asked` whole blocks."""
        self.lookups += 1
        self.hit_blocks += promised
        self.miss_blocks += asked - promised
        self.tail_hits += tail
        self.cut_promises += cut

    def add_store(self, pages: int, failed: int, published: int) -> None:
        """Counts a store that has ended."""
        self.stored_pages += published
        self.failed_store_pages += failed
        self.discarded_pages += pages - failed - published
