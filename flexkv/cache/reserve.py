"""How many slots of a large pool are kept free, so that planning a store rarely has to evict.

Evicting costs a store's plan, which an engine's step waits for, more than all the rest of it. When an op ends, nothing
waits: then the slots that the next store will want are freed. The price is that this share of the pool holds no blocks.
"""

from __future__ import annotations

RESERVE_FROM_SLOTS = 4096
"""Smaller pools keep no reserve: in them every slot counts, and their evictions are few."""

RESERVE_SHARE = 64
"""One slot in so many is kept free."""

RESERVE_MAX_PAGES = 16_384
"""More is never kept free: two prompts of 128k tokens at 16 a block."""

REFILL_PAGES = 512
"""Evicted at most when an op ends, or as many as that op had pages: some 20 us beyond the op's own share."""


def reserve_pages(up_slots: int) -> int:
    """Slots to keep free in a pool of which `up_slots` may be used."""
    return 0 if up_slots < RESERVE_FROM_SLOTS else min(up_slots // RESERVE_SHARE, RESERVE_MAX_PAGES)
