"""The pages on the unit's own disks, including those that are being written."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from flexkv.c_ext import SlotBoard
from flexkv.cache.base import NO_ENTRY, EntryIds
from flexkv.cache.ledger.page_times import Expiries, earlier
from flexkv.cache.tiers.contract import Plane, Sink, TierFacts, TierRoom
from flexkv.cache.tiers.stored_tier import StoredTier
from flexkv.cache.tiers.tables import TierContext
from flexkv.errors import ConfigError
from flexkv.facts.keys import Keys
from flexkv.observe import get_logger
from flexkv.storage.base import Places, Volumes
from flexkv.storage.tags import make_tags, tag_fields
from flexkv.transfer.graph import NEVER, NO_BLOCKS, OpId, OpKind, PageTags, Priority, SlotIds, TransferOp

logger = get_logger(__name__)


class DiskPages(StoredTier, Sink):
    """Reads and writes pages of the unit's own folders through host memory.

    Args:
        volumes: the open folders; closed with the tier.
        facts: limits and modes; see `TierFacts`.
        ttl_s: whole seconds after which a written page is a miss; None for never.
        plane: runs DISK_READ, DISK_WRITE and DISK_SEAL ops; None if the caller runs them.

    Raises:
        ConfigError: the time to live is not positive.
    """

    keeps_times = True

    def __init__(
        self,
        context: TierContext,
        volumes: Volumes,
        facts: TierFacts,
        ttl_s: int | None,
        plane: Plane | None = None,
    ) -> None:
        if ttl_s is not None and not ttl_s > 0:
            raise ConfigError(f"disk ttl_s={ttl_s}; allowed are values above 0")
        super().__init__(context, volumes, facts)
        self.volumes = volumes
        self.plane = plane
        self.sink = self
        self._ttl_s = ttl_s
        self._any_expires |= ttl_s is not None
        self._board: SlotBoard | None = None

    # --- the board for other units ---

    def show(self) -> SlotBoard:
        """Makes and returns a board, the memory in which peers see which pages are on the disks. It is kept up to date
        from now on. Precondition: all groups share the slots."""
        places = np.arange(len(self._tags[0]), dtype=np.int32)
        self._board = SlotBoard(len(places))
        self._note(0, places)
        self.presence.tell(self._board)
        return self._board

    def _note(self, group: int, places: Places) -> None:
        assert self._board is not None
        tags = self._fields(group, places)
        tokens, generations, expiries = (
            np.ascontiguousarray(tags[name]) for name in ("tokens", "generation", "expiry")
        )
        self._board.note(places, tokens, generations, expiries, self.epoch)

    # --- writes ---

    def known(self, group: int, keys: Keys) -> NDArray[np.bool_]:
        return np.asarray(self.presence.find(group, keys, ready_only=False) != NO_ENTRY)

    def room(self, group: int) -> int:
        return self.presence.up_slots(group)

    def plan_write(
        self, op_id: OpId, group: int, keys: Keys, slots: SlotIds, tokens: NDArray[np.int32]
    ) -> tuple[NDArray[np.integer], EntryIds, TransferOp | None]:
        times = self._hub.times
        expiries = times.of(group, slots) if times.any else None
        positions, entries, places, tags = self.begin_write(group, keys, tokens, len(keys), expiries)
        if not len(positions):
            return positions, entries, None
        return (
            positions,
            entries,
            TransferOp(
                op_id,
                OpKind.DISK_WRITE,
                group,
                Priority.STORE,
                NO_BLOCKS,
                slots[positions],
                places=places,
                tags=tags,
            ),
        )

    def begin_write(
        self,
        group: int,
        keys: Keys,
        tokens: NDArray[np.int32],
        room: int,
        expiries: Expiries | None = None,
    ) -> tuple[NDArray[np.uint32], EntryIds, Places, PageTags]:
        """Gives disk slots to at most `room` of the keys that have none, evicting other pages by the tier's policy.

        Args:
            tokens: number of valid tokens of each page.
            expiries: when the pages expire; None if no request has set a time. All pages expire after `ttl_s` at the
                latest.

        Returns:
            Positions of the keys that got a slot, their entries (pinned until `end_write`), their slots and their tags.
        """
        if self._any_expires and self.presence.free_slots(group) < len(keys):
            self.let_go_expired()
        positions, entries, places, evicted, _, _ = self.presence.insert(group, keys, room)
        self.counts.evicted += len(evicted)
        self._tell_gone(group, evicted, self.presence.gone_groups())
        former = self._fields(group, places)["generation"]
        if former.any():
            # The eviction is recorded before the slot is written, so that after a crash the index on disk does not list
            # the slot's old page.
            self.pages.record_evict(group, places[former != 0], former[former != 0])
        ends: Expiries | int = NEVER if self._ttl_s is None else self._now() + self._ttl_s
        if expiries is not None:
            ends = earlier(expiries[positions], ends)
            self._any_expires |= bool((ends != NEVER).any())
        self.note_asked(group, places, False if expiries is None else expiries[positions] != NEVER)
        generations = self.volumes.next_generations(len(places))
        tags = make_tags(keys[positions], self.epoch, generations, tokens[positions], ends)
        self._any_partial |= bool((tokens[positions] != self._sizes[group]).any())
        self._tags[group][places] = tag_fields(tags)
        if self._any_expires:
            self.presence.set_expiry(entries, tag_fields(tags)["expiry"].copy())
        return positions, entries, places, tags

    def generations(self, group: int, keys: Keys) -> NDArray[np.uint64]:
        """Returns the generation of each key's visible page, which identifies the write of the page, uint64 [keys]; 0
        for keys without a visible page. Removes expired pages that it finds."""
        there = self.present(group, keys)
        generations = np.zeros(len(keys), np.uint64)
        entries = self.presence.find(group, keys[there])
        generations[there] = self._fields(group, self.presence.slots_of(entries))["generation"]
        return generations

    def in_flight(self, group: int, entries: EntryIds) -> NDArray[np.bool_]:
        """Returns which of these entries may still become visible, bool [entries]: those that have not been removed
        since `begin_write`. Precondition: they have been pinned since then."""
        return np.asarray(
            self.presence.find(group, self.presence.keys_of(entries), ready_only=False) == entries
        )

    def end_write(self, group: int, entries: EntryIds, good: NDArray[np.bool_]) -> NDArray[np.bool_]:
        places, keys = self.presence.slots_of(entries), self.presence.keys_of(entries)
        if self._board is not None:
            self._note(group, places)
        published = self.presence.finish(entries, good.view(np.uint8)).view(np.bool_)
        there = places[published]
        if len(there):
            tags = self._fields(group, there)
            generations = tags["generation"].copy()
            self.volumes.record_publish(
                group,
                keys[published],
                there,
                generations,
                tags["tokens"].astype(np.int32),
                tags["expiry"].copy(),
            )
            for listener in self._hub.listeners:
                listener.on_write(group, keys[published], generations)
        return published

    def used(self, group: int, keys: Keys) -> None:
        entries = self.presence.find(group, keys)
        entries = entries[entries != NO_ENTRY]
        if len(entries):
            self.presence.touch(entries, len(entries))
            self.pages.record_use(group, self.presence.slots_of(entries))

    # --- a reset ---

    def begin_reset(self) -> None:
        super().begin_reset()
        self.volumes.begin_reset(self.epoch)

    @property
    def resets(self) -> bool:
        return self.volumes.resets

    def finish_reset(self, ends_s: float) -> None:
        self.volumes.finish_reset(max(0.0, ends_s - time.monotonic()))

    # --- weights ---

    def begin_open(self, weights: bytes) -> int:
        if not self.pages.strange_disks(weights):
            return 0
        strange = len(self)
        self.presence.clear()
        # The epoch grows by 2, so that an even epoch stays even and an odd one odd. Parity says whether the process
        # still has the weights that it loaded at its start (see `StoredTier`), and this method does not change the
        # weights.
        self.epoch += 2
        self.volumes.begin_reset(self.epoch)
        return strange

    @property
    def opens(self) -> bool:
        return self.volumes.resets

    def open_for(self, weights: bytes) -> None:
        self.volumes.finish_reset(0.0)
        self.volumes.name_weights(weights)
        super().open_for(weights)

    # --- the disks below ---

    def poll(self, now_s: float) -> None:
        self.let_go_expired()
        events = self.volumes.poll()
        self.durable_pages += sum(len(pages.places) for pages in events.durable)
        for lost in events.lost:
            logger.error(
                "disk %s is out of use, what it held is computed again: %s", lost.folder, lost.reason
            )
            self.lose(lost.disk)
        if events.lost and not any(self.volumes.alive):
            self.go_down("no disk is left")

    def go_down(self, reason: str) -> None:
        """Takes the tier out of use until the process ends, and notifies listeners that its pages are gone."""
        if not self.down:
            super().go_down(reason)
            for volume in range(self.volumes.disks):
                self.lose(volume)

    def room_of(self, group: int) -> TierRoom:
        alive, disks = sum(self.volumes.alive), self.volumes.disks
        pages = self.volumes.slots(group) // disks * alive
        there = f", on {alive} of {disks} disk(s); {len(self)} blocks there already"
        return TierRoom(pages, "disk.bytes_per_folder", alive, there)

    def gauges(self) -> Mapping[str, float]:
        slots = self.room_of(0).pages
        tokens = {"flexkv_disk_capacity_tokens": slots * self._sizes[0]} if len(self._sizes) == 1 else {}
        return {
            "flexkv_disk_slots": slots,
            "flexkv_disk_slots_used": len(self.presence),
            "flexkv_disks": sum(self.volumes.alive),
            **tokens,
        }

    @property
    def unflushed(self) -> bool:
        return self.volumes.unflushed

    def durable(self) -> bool:
        stats = self.volumes.stats()
        # `stats` must be called before `poll`. A journal that has failed shows no lag, but `poll` then finds that its
        # disk is lost. And `poll` hands pending records to the journals, which `stats` would then count as lag.
        self.poll(time.monotonic())
        return not (stats.journal_lag_s > 0 or stats.pending_pages)

    def close(self, deadline_s: float) -> bool:
        return self.volumes.close(deadline_s)
