"""A model of one group of a block index in plain Python: which blocks the index holds, and which it evicts next. Tests
compare the index with this model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass
class Block:
    """A block that the index holds.

    Attributes:
        order: position of the block's last use in the order of all uses; 0 if the block was never used.
        used_at: how many uses (first stores and hits of any block) there were up to this block's last use.
        put_back: for a spare block, the position in the order of all uses at which its last lease ended.
    """

    pins: int
    ready: bool = False
    order: int = 0
    used_at: int = 0
    hit: bool = False
    spare: bool = False
    put_back: int = 0


def oldest(blocks: Sequence[tuple[bytes, Block]], capacity: int) -> bytes:
    """LRU: chooses the least recently used block."""
    return min(blocks, key=lambda item: item[1].order)[0]


def oldest_with_bonus(blocks: Sequence[tuple[bytes, Block]], capacity: int) -> bytes:
    """bonus_lru: LRU, but a block that was hit counts as if it were used `capacity` uses later. If two blocks tie, the
    one without a hit is evicted first.
    """

    def rank(item: tuple[bytes, Block]) -> tuple[int, bool, int]:
        block = item[1]
        return block.used_at + (capacity if block.hit else 0), block.hit, block.order

    return min(blocks, key=rank)[0]


SPARE_SHARE = 16
"""If spare blocks take more than one of this many slots, they are evicted first."""

Choice = Callable[[Sequence[tuple[bytes, Block]], int], bytes]

CHOICES: dict[str, Choice] = {"lru": oldest, "bonus_lru": oldest_with_bonus}


class ModelIndex:
    """A model of one group of a block index.

    Args:
        slots: number of slots, all of them ready.
        choice: chooses the block to evict among those that may be evicted.
    """

    def __init__(self, slots: int, choice: Choice) -> None:
        self.slots = slots
        self.blocks: dict[bytes, Block] = {}
        self._choice = choice
        self._uses = 0
        self._used = 0

    @property
    def free(self) -> int:
        return self.slots - len(self.blocks)

    @property
    def idle(self) -> int:
        """The number of slots without a leased block."""
        return self.slots - sum(block.pins > 0 for block in self.blocks.values())

    def ready(self, key: bytes) -> bool:
        return key in self.blocks and self.blocks[key].ready

    def spare(self, keys: Sequence[bytes]) -> list[int]:
        """Returns for each key that is present whether its block is a spare block."""
        return [int(self.blocks[key].spare) for key in keys if key in self.blocks]

    def _use(self, keys: Sequence[bytes], hits: int) -> None:
        """Marks blocks as used, from the last key to the first. The first `hits` of the keys count as hits."""
        for number in reversed(range(len(keys))):
            block = self.blocks[keys[number]]
            hit = number < hits
            if block.spare and not hit:
                self._uses += 1
                block.put_back = self._uses
                continue
            block.spare = False
            self._used += hit or block.order == 0
            self._uses += 1
            block.order, block.used_at, block.hit = self._uses, self._used, block.hit or hit

    def pin(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.blocks[key].pins += 1

    def unpin(self, keys: Sequence[bytes], hit: bool = False) -> None:
        for key in keys:
            self.blocks[key].pins -= 1
        unleased = [key for key in keys if self.blocks[key].pins == 0]
        self._use(unleased, len(unleased) if hit else 0)

    def touch(self, keys: Sequence[bytes], hits: int = 0) -> None:
        marked = [
            (key, n < hits)
            for n, key in enumerate(keys)
            if self.ready(key) and not self.blocks[key].pins and (n < hits or not self.blocks[key].spare)
        ]
        self._use([key for key, _ in marked], sum(hit for _, hit in marked))

    def victims(self, count: int) -> list[bytes]:
        """Returns the next `count` blocks that the index would evict, in order. Does not evict them."""
        left = [(key, block) for key, block in self.blocks.items() if block.ready and not block.pins]
        chosen: list[bytes] = []
        spares = sum(block.spare for block in self.blocks.values())
        while left and len(chosen) < count:
            spare = [(key, block.put_back) for key, block in left if block.spare]
            others = [(key, block) for key, block in left if not block.spare]
            if spare and (not others or spares > self.slots // SPARE_SHARE):
                key = min(spare, key=lambda item: item[1])[0]
                spares -= 1
            else:
                key = self._choice(others, self.slots)
            chosen.append(key)
            left = [item for item in left if item[0] != key]
        return chosen

    def evict(self, count: int) -> list[bytes]:
        chosen = self.victims(count)
        for key in chosen:
            del self.blocks[key]
        return chosen

    def insert(
        self, keys: Sequence[bytes], most: int, spare: bool = False
    ) -> tuple[list[bytes], list[bytes]]:
        """Inserts at most `most` of the unknown keys. Returns the inserted keys and the evicted ones."""
        evicted: list[bytes] = []
        wanted = min(most, sum(key not in self.blocks for key in keys))
        known = [key for key in keys if self.ready(key)]
        if wanted > self.free:
            self.pin(known)
            evicted = self.evict(wanted - self.free)
            self.unpin(known)
        new: list[bytes] = []
        for key in keys:
            if key not in self.blocks and len(new) < most and self.free:
                self.blocks[key] = Block(pins=1, spare=spare)
                new.append(key)
        if not spare:
            for key in keys:
                if key in self.blocks:
                    self.blocks[key].spare = False
            self.touch(known)
        return new, evicted

    def finish(self, keys: Sequence[bytes], ok: Sequence[bool]) -> None:
        for key, good in zip(keys, ok, strict=True):
            if good:
                self.blocks[key].ready = True
            else:
                del self.blocks[key]
        self.unpin([key for key, good in zip(keys, ok, strict=True) if good])

    def remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            del self.blocks[key]
