"""Models which requests get room for their reads, and which have to wait: a second implementation of the rules of
`flexkv.cache.promise.room_line`.

A request gets *room* if there are free host slots for the pages that it reads, and the limits on pages and ops in
flight allow the reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flexkv.cache.base import OpRole
from flexkv.simulation.base import Key, require
from flexkv.simulation.model import Model


@dataclass
class ReadRoom:
    """Limits on the reads from disk that are in flight.

    Attributes:
        pages: maximum number of pages that all these reads have together.
        ops: maximum number of reads in flight.
    """

    pages: int
    ops: int


class LineModel:
    """The queue of requests that wait for room. All requests' lookups that had to wait are numbered in one sequence.
    For each request, the queue stores the numbers of its lookups."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._asked: dict[str, list[int]] = {}
        self._questions = 0

    def __len__(self) -> int:
        return len(self._asked)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._asked

    def leave(self, request_id: str) -> None:
        self._asked.pop(request_id, None)

    def clear(self) -> None:
        self._asked.clear()

    def ask(self, request_id: str) -> None:
        """Records a lookup of a request that has to wait, and queues the request if it is new."""
        self._questions += 1
        self._asked.setdefault(request_id, []).append(self._questions)

    def first(self, request_id: str) -> bool:
        """Returns whether it is this request's turn: since the request's second-to-last lookup, the engine has looked
        up no request ahead of it in the queue. If the request has fewer than two lookups, it must be the first in the
        queue."""
        mine = self._asked.get(request_id, [])
        for other, asked in self._asked.items():
            if other == request_id:
                break
            if len(mine) < 2 or asked[-1] > mine[-2]:
                return False
        return True

    def reads_begun(self, before: set[int], keys: Sequence[Sequence[bytes]]) -> list[Key]:
        """Returns those of the keys whose pages are read by ops that began after `before`, a set of earlier op ids, was
        recorded."""
        blocks = {(group, key) for group, of_group in enumerate(keys) for key in of_group}
        ops = [op for op_id, op in self.model.disk_ops.items() if op_id not in before]
        return [key for op in ops if op.role is OpRole.LOAD for key in op.keys if key in blocks]

    def check_given(self, was_first: bool, wanted: Iterable[Key], most: ReadRoom) -> None:
        """Checks a lookup that got room. It must have been the request's turn (`was_first`). If all pages of `wanted`
        fit into an empty host memory, each of them must be in host memory or being read.
        """
        require(was_first, "room was given past one who waits for it")
        wanted = list(wanted)
        lacking = [key for key in wanted if key not in self.model.visible and not self._coming(key)]
        if lacking:
            require(not self._fits(wanted, most), "room was given to a part of a prompt")

    def check_told_to_wait(self, was_first: bool, wanted: Iterable[Key], most: ReadRoom) -> None:
        """Checks a lookup that has to wait. Either it was not the request's turn (`was_first` is False), or there is no
        room for the pages of `wanted`."""
        wanted = list(wanted)
        lacking = [key for key in wanted if key not in self.model.visible and not self._coming(key)]
        reads = [op for op in self.model.disk_ops.values() if op.role is OpRole.LOAD]
        in_flight = sum(len(op.keys) for op in reads)
        ops = len({group for group, _ in lacking})
        room = len(lacking) + in_flight <= most.pages and len(reads) + ops <= most.ops
        for group in {group for group, _ in wanted}:
            room = room and self._unheld(group, wanted) <= self._idle(group)
        require(not (was_first and room), "a lookup was told to wait with room for all of it")

    def _coming(self, key: Key) -> bool:
        return self.model.pending.get(key) in self.model.disk_ops

    def _idle(self, group: int) -> int:
        return self.model.up[group] - len(self.model.held_slots(group))

    def _unheld(self, group: int, wanted: Sequence[Key]) -> int:
        """Returns how many wanted pages are neither in a slot in use (`Model.held_slots`) nor being read. Counts the
        pages of all groups that share the slots of `group`.
        """
        held = self.model.held_slots(group)
        mine = [key for key in wanted if key[0] in self.model.shares(group)]
        return sum(self.model.visible.get(key) not in held and not self._coming(key) for key in mine)

    def _fits(self, wanted: Sequence[Key], most: ReadRoom) -> bool:
        """Returns whether an empty host memory could hold all wanted pages at once, and all wanted pages that are not
        in host memory now could be read at once.
        """
        lacking = [key for key in wanted if key not in self.model.visible]
        if len(lacking) > most.pages or len({group for group, _ in lacking}) > most.ops:
            return False
        for group in {group for group, _ in wanted}:
            if (
                len([key for key in wanted if key[0] in self.model.shares(group)])
                > self.model.specs[group].slots
            ):
                return False
        return True
