"""The lane between host slots and simulated disks: moves ops page by page on demand, and checks their places."""

from __future__ import annotations

from collections.abc import Callable

from flexkv.simulation.base import Symbol, require
from flexkv.simulation.symbolic_volumes import SymbolicVolumes, identities
from flexkv.transfer.graph import OpKind, TransferOp

WRITES = (OpKind.DISK_WRITE, OpKind.DISK_SEAL, OpKind.GDS_WRITE)


class SimDiskLane:
    """Ops between host slots and a simulated disk, moved page by page on demand.

    Args:
        get_slot: group and slot -> the symbols there, one per rank.
        set_slot: puts symbols into a slot.

    Attributes:
        missing: by op, the pages of a read that their places do not hold.
        slot_states: group and host slot -> the read that ended there last, and whether its page is good.
        rank_ops: ops of the ranks themselves. While they run, other ops must not write the places that they read, or
            touch the places that they write.
    """

    def __init__(
        self,
        tier: SymbolicVolumes,
        get_slot: Callable[[int, int], list[Symbol]],
        set_slot: Callable[[int, int, list[Symbol] | None], None],
    ) -> None:
        self._tier = tier
        self._get_slot = get_slot
        self._set_slot = set_slot
        self.left: dict[int, list[int]] = {}
        self.ops: dict[int, TransferOp] = {}
        self.failed: dict[int, list[int]] = {}
        self.missing: dict[int, set[int]] = {}
        self.slot_states: dict[tuple[int, int], tuple[int, bool]] = {}
        self.rank_ops: dict[int, TransferOp] = {}

    def submit(self, op: TransferOp) -> None:
        """Takes an op over and checks that no other op is in the way at its places."""
        self._check_places(op)
        self.ops[op.op_id] = op
        self.left[op.op_id] = list(range(op.pages))
        self.failed[op.op_id] = []
        self.missing[op.op_id] = set()

    def submit_of_ranks(self, op: TransferOp) -> None:
        """Begins an op that the ranks carry out."""
        self._check_places(op)
        self.rank_ops[op.op_id] = op

    def _check_places(self, op: TransferOp) -> None:
        require(
            len(op.places) == len(op.tags) == op.pages, "a disk op without a place and a tag for each page"
        )
        # A load that was promised before a disk was lost still arrives afterwards, and fails.
        if op.kind is not OpKind.GDS_READ:
            self._tier.check_places(op.places)
        for other in (*self.ops.values(), *self.rank_ops.values()):
            if other.group == op.group and (op.kind in WRITES or other.kind in WRITES):
                shared = set(op.places.tolist()) & set(other.places.tolist())
                require(not shared, "a disk slot was given away while an op uses it")

    def move_page(self, op_id: int, fails: bool) -> bool:
        """Moves the next page of an op; a failing one leaves garbage. Returns True if it was the last."""
        op, page = self.ops[op_id], self.left[op_id].pop(0)
        place, identity = int(op.places[page]), identities(op)[page]
        if op.kind in WRITES:
            if op.kind is OpKind.DISK_SEAL:
                done = self._tier.seal(op.group, place, identity, op.digests[page].tolist())
            else:
                slot = int(op.slots[page])
                done = self._tier.write(op.group, place, identity, self._get_slot(op.group, slot))
            if fails:
                self._tier.content[op.group].pop(place, None)
        else:
            slot = int(op.slots[page])
            symbols = None if fails else self._tier.read(op.group, place, identity)
            done = symbols is not None
            if not (done or fails):
                self.missing[op_id].add(page)
            self._set_slot(op.group, slot, symbols)
            self.slot_states[op.group, slot] = op_id, done
        if fails or not done:
            self.failed[op_id].append(page)
        return not self.left[op_id]

    def arrived(self, group: int, slot: int, read: int) -> bool | None:
        """Whether the page that `read` brings to a slot has arrived and is good; None before it has arrived."""
        last, good = self.slot_states.get((group, slot), (0, False))
        return None if last < read else last == read and good

    def end(self, op_id: int) -> tuple[TransferOp, list[int]]:
        """Removes an op and returns it with its failed pages. Its pages that have not moved yet will never move."""
        op = self.ops[op_id]
        for page in self.left.pop(op_id) if op.kind is OpKind.DISK_READ else ():
            self.slot_states[op.group, int(op.slots[page])] = op_id, False
        self.left.pop(op_id, None)
        del self.missing[op_id]
        return self.ops.pop(op_id), self.failed.pop(op_id)
