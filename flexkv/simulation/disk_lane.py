"""The lane between host slots and simulated disks. Each call of `move_page` moves one page of an op. The lane checks
that ops in flight do not use each other's disk slots."""

from __future__ import annotations

from collections.abc import Callable

from flexkv.simulation.base import Symbol, require
from flexkv.simulation.symbolic_volumes import SymbolicVolumes, identities
from flexkv.transfer.graph import OpKind, TransferOp

WRITES = (OpKind.DISK_WRITE, OpKind.DISK_SEAL, OpKind.GDS_WRITE)


class SimDiskLane:
    """The ops in flight between host slots and simulated disks.

    Args:
        tier: the simulated disks.
        get_slot: takes a group and a host slot, and returns the symbols in the slot, one per rank.
        set_slot: puts one symbol per rank into a host slot of a group, or garbage for None.

    Attributes:
        left: by op id, positions of the pages that have not moved yet.
        ops: the ops in flight, by op id.
        failed: by op id, positions of the pages that failed.
        missing: by op id of a read, positions of the pages that were not in their disk slots.
        slot_states: by group and host slot, the id of the last op that read a page into the slot, and whether the page
            is good.
        rank_ops: the ops in flight that the ranks carry out, by op id. If such an op reads a disk slot, no other op may
            write that slot; if it writes a disk slot, no other op may use that slot.
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
        """Begins an op, and checks that its disk slots do not conflict with another op in flight."""
        self._check_places(op)
        self.ops[op.op_id] = op
        self.left[op.op_id] = list(range(op.pages))
        self.failed[op.op_id] = []
        self.missing[op.op_id] = set()

    def submit_of_ranks(self, op: TransferOp) -> None:
        """Records an op that the ranks carry out, and checks its disk slots like those of other ops."""
        self._check_places(op)
        self.rank_ops[op.op_id] = op

    def _check_places(self, op: TransferOp) -> None:
        require(
            len(op.places) == len(op.tags) == op.pages, "a disk op without a place and a tag for each page"
        )
        # GDS reads are not checked, because a load that was promised before a disk was lost is still submitted
        # afterwards. Such a load fails.
        if op.kind is not OpKind.GDS_READ:
            self._tier.check_places(op.places)
        for other in (*self.ops.values(), *self.rank_ops.values()):
            if other.group == op.group and (op.kind in WRITES or other.kind in WRITES):
                shared = set(op.places.tolist()) & set(other.places.tolist())
                require(not shared, "a disk slot was given away while an op uses it")

    def move_page(self, op_id: int, fails: bool) -> bool:
        """Moves the next page of an op, and returns whether it was the op's last page. If `fails`, a read leaves
        garbage in its host slot, and a write leaves no page in its disk slot."""
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
        """Returns whether the page that the op `read` reads into a host slot is good; None if the page has not arrived
        yet."""
        last, good = self.slot_states.get((group, slot), (0, False))
        return None if last < read else last == read and good

    def end(self, op_id: int) -> tuple[TransferOp, list[int]]:
        """Removes an op, so that none of its remaining pages is moved. Returns the op and the positions of its failed
        pages."""
        op = self.ops[op_id]
        for page in self.left.pop(op_id) if op.kind is OpKind.DISK_READ else ():
            self.slot_states[op.group, int(op.slots[page])] = op_id, False
        self.left.pop(op_id, None)
        del self.missing[op_id]
        return self.ops.pop(op_id), self.failed.pop(op_id)
