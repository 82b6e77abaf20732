"""Simulated disks without bytes: each disk slot (`place` in code) has a page's identity and one symbol per rank.

The simulated disks implement the parts of the contract `flexkv.storage.base.Volumes` that matter to a manager. They
check the manager's requests. After a disk's loss was reported to the manager, the manager must not use the disk. It
must not publish a page that was not written, nor overwrite a page before it has recorded the page's eviction.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import ContractError
from flexkv.simulation.base import Symbol, require
from flexkv.storage.base import (
    DiskEvents,
    DiskStats,
    DurablePages,
    Generations,
    IndexRows,
    Keys,
    LostDisk,
    Places,
    Volumes,
)
from flexkv.storage.tags import tag_fields
from flexkv.transfer.graph import TransferOp

Identity = tuple[bytes, int, int, int]
"""Key, generation, epoch and tokens of a page: the fields of its tag that a read compares."""


def stripe_digest(rank: int, symbol: Symbol) -> int:
    """Returns the digest that a rank reports for a stripe of one run, computed from the stripe's symbol."""
    return int.from_bytes(hashlib.sha256(repr((rank, symbol)).encode()).digest()[:8], "little")


def identities(op: TransferOp) -> list[Identity]:
    """Returns the identity of each page of an op, from the op's tags."""
    return [
        (bytes(tag["key"]), int(tag["generation"]), int(tag["epoch"]), int(tag["tokens"]))
        for tag in tag_fields(op.tags)
    ]


class SymbolicVolumes(Volumes):
    """Simulated disks, over which the disk slots of each group are striped.

    Args:
        slots: number of disk slots of each group.
        disks: number of disks.

    Attributes:
        content: for each group, by disk slot, identity and symbols of the page that was written to the slot. A torn
            write leaves no entry.
        journal: for each group, by disk slot, the row that a new process would find after a crash: key, generation,
            tokens, expiry.
    """

    def __init__(self, slots: Sequence[int], disks: int = 2) -> None:
        self._slots = list(slots)
        self._alive = [True] * disks
        self._generation = 0
        self._epoch = 0
        self._lost: list[LostDisk] = []
        self._durable: list[DurablePages] = []
        self.content: list[dict[int, tuple[Identity, list[Symbol]]]] = [{} for _ in slots]
        self.journal: list[dict[int, tuple[bytes, int, int, int]]] = [{} for _ in slots]
        self._stripes: list[dict[int, dict[int, Symbol]]] = [{} for _ in slots]
        """For each group: disk slot whose page has no trailer yet -> rank -> symbol that the rank wrote to the slot."""
        self._named: tuple[bytes, int] | None = None
        """The weights that were named last, and the epoch at that time; None if no weights were named yet."""
        self._announced: set[int] = set()
        self.closed = False

    @classmethod
    def reopened(cls, former: SymbolicVolumes) -> SymbolicVolumes:
        """Returns the disks `former` as a new process finds them: with the rows of the journal and the written
        pages."""
        tier = cls(former._slots, former.disks)
        tier._alive = list(former._alive)
        # New generations must be higher than all earlier ones. On real disks, the highest bits of a generation count
        # how often the disks were opened.
        tier._generation = former._generation + (1 << 20)
        tier._epoch, tier._named = former._epoch, former._named
        tier.content, tier.journal = former.content, former.journal
        return tier

    # --- methods of the contract `Volumes` ---

    @property
    def disks(self) -> int:
        return len(self._alive)

    @property
    def folder(self) -> None:
        return None

    @property
    def alive(self) -> tuple[bool, ...]:
        return tuple(self._alive)

    @property
    def epoch(self) -> int:
        return self._epoch

    def strange_disks(self, weights: bytes) -> tuple[int, ...]:
        is_strange = any(self.journal) and self._named != (weights, self._epoch)
        return tuple(range(self.disks)) if is_strange else ()

    def name_weights(self, weights: bytes) -> None:
        self._named = (weights, self._epoch)

    def slots(self, group: int) -> int:
        return self._slots[group]

    def image_bytes(self, group: int) -> int:
        raise ContractError("a simulated disk has no bytes")

    def slab_map(self) -> Any:
        raise ContractError("a simulated disk has no slabs")

    def digest_offsets(self, group: int) -> tuple[int, ...]:
        raise ContractError("a simulated disk has no bytes")

    def lane(self, pools: Sequence[Any]) -> Any:
        raise ContractError("a simulated disk has no bytes")

    def rows(self, group: int) -> IndexRows:
        rows = self.journal[group]
        keys = np.frombuffer(b"".join(row[0] for row in rows.values()), np.uint8).reshape(-1, 16)
        return IndexRows(
            keys.copy(),
            np.array(list(rows), np.int32),
            np.array([row[1] for row in rows.values()], np.uint64),
            np.array([row[2] for row in rows.values()], np.int32),
            np.array([row[3] for row in rows.values()], np.uint64),
        )

    def next_generations(self, count: int) -> Generations:
        first = self._generation + 1
        self._generation += count
        return np.arange(first, first + count, dtype=np.uint64)

    def record_publish(
        self,
        group: int,
        keys: Keys,
        places: Places,
        generations: Generations,
        tokens: NDArray[np.int32],
        expiries: NDArray[np.uint64] | None = None,
    ) -> bool:
        ends = np.zeros(len(places), np.uint64) if expiries is None else expiries
        for key, place, generation, count, end in zip(
            keys, places.tolist(), generations.tolist(), tokens.tolist(), ends.tolist(), strict=True
        ):
            identity = (bytes(key), generation, self._epoch, count)
            content = self.content[group].get(place)
            require(
                content is not None and content[0] == identity,
                "a page was published on disk that was not written there",
            )
            self.journal[group].pop(place, None)
            self.journal[group][place] = (bytes(key), generation, count, end)
        self._durable.append(DurablePages(group, places, generations))
        return True

    def record_evict(self, group: int, places: Places, generations: Generations) -> None:
        for place, generation in zip(places.tolist(), generations.tolist(), strict=True):
            row = self.journal[group].get(place)
            if row is not None and row[1] == generation:
                del self.journal[group][place]

    def record_use(self, group: int, places: Places) -> None:
        for place in places.tolist():
            if place in self.journal[group]:
                self.journal[group][place] = self.journal[group].pop(place)

    @property
    def unflushed(self) -> bool:
        return False

    def poll(self) -> DiskEvents:
        events = DiskEvents(tuple(self._durable), tuple(self._lost))
        self._announced.update(lost.disk for lost in self._lost)
        self._durable, self._lost = [], []
        return events

    def stats(self) -> DiskStats:
        return DiskStats()

    @property
    def resets(self) -> bool:
        return False

    def finish_reset(self, deadline_s: float) -> None:
        """Does nothing, because a simulated reset is durable at once."""

    def reset(self, epoch: int, deadline_s: float = 30.0) -> None:
        self.begin_reset(epoch)

    def begin_reset(self, epoch: int) -> None:
        require(epoch > self._epoch, "a reset did not raise the epoch on disk")
        self._epoch = epoch
        for rows in self.journal:
            rows.clear()

    def close(self, deadline_s: float) -> bool:
        self.closed = True
        return True

    # --- methods that only the simulation calls ---

    def lose(self, disk: int) -> None:
        """Makes a disk fail permanently."""
        if self._alive[disk]:
            self._alive[disk] = False
            self._lost.append(LostDisk(disk, Path(f"/disk{disk}"), "simulated"))
            for group, content in enumerate(self.content):
                for place in [place for place in content if place % self.disks == disk]:
                    del content[place]
                for place in [place for place in self.journal[group] if place % self.disks == disk]:
                    del self.journal[group][place]

    def check_places(self, places: Places) -> None:
        """Checks that none of the disk slots `places` is on a disk whose loss was reported to the manager."""
        used = {place % self.disks for place in places.tolist()}
        require(not used & self._announced, "a place on a lost disk was given away")

    def named(self, op: TransferOp) -> set[int]:
        """Returns the positions of an op's pages that the durable index lists in the op's disk slots."""
        rows = [self.journal[op.group].get(place) for place in op.places.tolist()]
        wanted = zip(rows, identities(op) if rows else (), strict=True)
        return {page for page, (row, (_, write, _, _)) in enumerate(wanted) if row and row[1] == write}

    def require_kept(self, op: TransferOp, pages: set[int]) -> None:
        """Checks that the pages at the positions `pages` of an op are still in the durable index. The caller passes
        only pages that did not fail because of their content."""
        require(pages <= self.named(op), "a page whose content did not fail was forgotten on disk")

    def require_forgotten(self, op: TransferOp, pages: Iterable[int]) -> None:
        """Checks that the durable index no longer has the pages at the positions `pages` of an op. The caller passes
        pages that could not be read from the op's disk slots.
        """
        wanted = identities(op)
        for page in pages:
            row = self.journal[op.group].get(int(op.places[page]))
            require(
                row is None or row[1] != wanted[page][1],
                "a page that could not be read is still in the index on disk",
            )

    def write(self, group: int, place: int, identity: Identity, symbols: list[Symbol]) -> bool:
        """Writes a page over a disk slot's old content, and returns whether the write succeeded. Checks that the index
        that survives a crash does not list the old content.
        """
        require(
            place not in self.journal[group],
            "a place was overwritten while the index that survives a crash names its old content",
        )
        self._void(group, place)
        if not self._alive[place % self.disks]:
            return False
        self.content[group][place] = (identity, symbols)
        return True

    def write_stripe(self, group: int, place: int, rank: int, symbol: Symbol) -> bool:
        """Writes a rank's stripe of a page, and returns whether the write succeeded. The former page of the disk slot
        is lost. Checks that the index that survives a crash does not list the former page.
        """
        require(
            place not in self.journal[group],
            "stripes were written to a place that the index that survives a crash names",
        )
        self.content[group].pop(place, None)
        if not self._alive[place % self.disks]:
            return False
        self._stripes[group].setdefault(place, {})[rank] = symbol
        return True

    def seal(self, group: int, place: int, identity: Identity, digests: list[int]) -> bool:
        """Writes the trailer of a page whose stripes the ranks have written. Returns whether the write succeeded."""
        stripes = self._stripes[group].get(place, {})
        if not self._alive[place % self.disks]:
            return False
        require(
            digests == [stripe_digest(rank, stripes[rank]) for rank in sorted(stripes)],
            "a page was sealed with digests of other bytes than its ranks wrote",
        )
        return self.write(group, place, identity, [stripes[rank] for rank in sorted(stripes)])

    def _void(self, group: int, place: int) -> None:
        self.content[group].pop(place, None)
        self._stripes[group].pop(place, None)

    def read(self, group: int, place: int, identity: Identity) -> list[Symbol] | None:
        """Returns the symbols in a disk slot; None if the slot does not have the requested page."""
        content = self.content[group].get(place)
        if content is None or content[0] != identity or not self._alive[place % self.disks]:
            return None
        return content[1]
