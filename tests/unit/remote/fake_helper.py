"""A stand-in for the helper process of the remote store. No process runs: the test sends messages in place of the
helper, and advances the clock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from flexkv.errors import StoreError
from flexkv.remote.link import HelperLink
from flexkv.remote.messages import (
    Alive,
    Answer,
    Cancel,
    Done,
    FromHelper,
    Get,
    Probe,
    Progress,
    Put,
    Ready,
    Setup,
    ToHelper,
)
from flexkv.remote.plane import PlaneLimits, RemotePlane
from flexkv.remote.process import HelperProcess
from flexkv.storage.tags import make_tags
from flexkv.transfer.graph import NO_BLOCKS, FailureCause, OpId, OpKind, Priority, TransferGraph, TransferOp
from tests.unit.remote.remote_unit import chain

STUCK_S = 5.0


class FakeHelper:
    """Replaces a `HelperProcess`. It has only the attributes and methods that `HelperLink` uses.

    Attributes:
        got: messages that the unit has sent to the helper.
        says: messages to the unit, which the unit has not received yet; an error stands for an invalid message.
        room: whether the helper's socket accepts messages.
    """

    def __init__(self) -> None:
        self.got: list[ToHelper] = []
        self.says: deque[FromHelper | StoreError] = deque()
        self.ended = ""
        self.room = True
        self.was_killed = False
        self.closes = True

    def send(self, message: ToHelper) -> bool:
        if self.room:
            self.got.append(message)
        return self.room

    def receive(self) -> FromHelper | None:
        said = self.says.popleft() if self.says else None
        if isinstance(said, StoreError):
            raise said
        return said

    def kill(self) -> None:
        self.was_killed = True

    def close(self, deadline_s: float) -> bool:
        return self.closes

    def all_of(self, kind: type) -> list[Any]:
        return [message for message in self.got if isinstance(message, kind)]


class PlayedPlane:
    """A remote plane whose helpers are FakeHelpers, which the test controls. At first its store works.

    Attributes:
        helpers: the helpers that were started, in order; the last one is running.
    """

    def __init__(self, queue_ops: int = 4, keeps_slots: bool = False, questions: int = 16) -> None:
        self.now_s = 100.0
        self.helpers: list[FakeHelper] = []
        setup = cast(Setup, "the setup")
        self.link = HelperLink(setup, self._launch, STUCK_S, lambda: self.now_s)
        self.plane = RemotePlane(
            self.link, PlaneLimits(queue_ops, questions, 0.05, keeps_slots), lambda: self.now_s
        )
        self.link._begin()
        self.answer_alive()

    def _launch(self) -> HelperProcess:
        self.helpers.append(FakeHelper())
        return cast(HelperProcess, self.helpers[-1])

    @property
    def helper(self) -> FakeHelper:
        return self.helpers[-1]

    def answer_alive(self, lost: str = "") -> None:
        """Makes the helper report that it is ready, and answer the unit's question whether the store is alive. If
        `lost` is not empty, the helper reports the store as lost for this reason."""
        self.helper.says.append(Ready())
        self.plane.watch()
        self.helper.says.append(Answer(self.helper.all_of(Alive)[-1].number, lost=lost))
        self.plane.watch()
        assert self.link.usable is not bool(lost)

    def after(self, seconds: float) -> None:
        self.now_s += seconds
        self.plane.watch()

    def end(self, how: str = "its process ended by signal 9") -> None:
        """Ends the helper's process for the reason `how`, and lets the plane reap it."""
        self.helper.ended = how
        self.plane.watch()

    def submit(self, *ops: TransferOp) -> bool:
        return self.plane.submit(TransferGraph(ops)) is not None

    def get(self, number: int, pages: int = 3) -> list[int]:
        """Submits op `number`, which reads `pages` pages. Returns the numbers of the messages to the helper that the
        plane sends for this op."""
        return self._submit(number, OpKind.DISK_READ, pages, Get)

    def put(self, number: int, pages: int = 3) -> list[int]:
        return self._submit(number, OpKind.DISK_WRITE, pages, Put)

    def _submit(self, number: int, kind: OpKind, pages: int, message: type) -> list[int]:
        before = len(self.helper.all_of(message))
        assert self.submit(op_of(number, kind, pages))
        return [sent.number for sent in self.helper.all_of(message)[before:]]

    def ask(self, number: int) -> int:
        assert self.plane.ask(OpId(number), [chain("asked", 4)], [True])
        return int(self.helper.all_of(Probe)[-1].number)

    def done(
        self,
        number: int,
        failed: Sequence[int] = (),
        ok: int = 3,
        cause: int = 1,
        lost: str = "",
        outcome: str = "content",
    ) -> None:
        causes = np.full(len(failed), cause, np.uint8)
        outcomes = Counter({"ok": ok - len(failed), outcome: len(failed)})
        self.helper.says.append(
            Done(number, np.array(failed, np.int32), causes, outcomes, "why" if len(failed) else "", lost)
        )

    def progress(self, number: int) -> None:
        self.helper.says.append(Progress(number))

    def cancelled_up_to(self) -> int:
        return max((message.number for message in self.helper.all_of(Cancel)), default=0)


def op_of(number: int, kind: OpKind, pages: int = 3) -> TransferOp:
    tags = make_tags(
        chain(number, pages), 0, np.zeros(pages, np.uint64), np.arange(1, pages + 1, dtype=np.int32)
    )
    slots = np.arange(pages, dtype=np.int32)
    return TransferOp(OpId(number), kind, 0, Priority.LOAD, NO_BLOCKS, slots, places=slots, tags=tags)


def not_executed(pages: int) -> np.ndarray:
    return np.full(pages, FailureCause.NOT_EXECUTED, np.uint8)
