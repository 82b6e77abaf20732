"""Running totals of a cache manager."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from flexkv.observe import MissReason


@dataclass(slots=True)
class ManagerStats:
    """Running totals of one manager since it was made.

    Attributes:
        lookups: number of calls of `match`.
        hit_blocks: whole blocks promised by lookups, in blocks of the first group.
        miss_blocks: whole blocks that lookups asked for and did not promise, in blocks of the first group.
        tail_hits: number of partial tails promised.
        loaded_pages: pages that were loaded on every rank.
        failed_load_pages: pages that failed to load on at least one rank.
        stored_pages: pages of stores that were published.
        failed_store_pages: pages that failed to be stored on at least one rank.
        discarded_pages: pages that were stored without failure but not published: revoked, forgotten, of an old epoch,
            or stored while a load of the request was in flight.
        busy_pages: offered pages that were not stored, because there was no free slot or no queue entry.
        evicted_blocks: blocks that were evicted from host memory to free slots.
        expired_blocks: blocks that were removed from host memory because their time to live was over.
        forgotten_blocks: blocks that became misses through `forget` or a failed load.
        expired_leases: lookups whose lease expired before a load.
        cut_promises: lookups whose promise was cut because the limit of promised pages was reached.
        resets: number of resets.
        streamed_pages: pages whose load began while they were still being fetched to host memory.
        missed: by reason, whole blocks that lookups did not promise; only lookups on which the engine acted count.
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
        return replace(self, missed=dict(self.missed))

    def add_lookup(self, asked: int, promised: int, tail: bool, cut: bool) -> None:
        """Counts a lookup that asked for `asked` whole blocks and promised `promised`, perhaps with a tail.

        Args:
            cut: whether the promise was cut because the limit of promised pages was reached.
        """
        self.lookups += 1
        self.hit_blocks += promised
        self.miss_blocks += asked - promised
        self.tail_hits += tail
        self.cut_promises += cut

    def add_store(self, pages: int, failed: int, published: int) -> None:
        """Counts the pages of a store that has ended."""
        self.stored_pages += published
        self.failed_store_pages += failed
        self.discarded_pages += pages - failed - published
