"""Moves a unit's pages between its host pool and a store, through the helper: a process that may hang, die or answer
wrongly.

Every op ends exactly once, after its bytes have stopped moving. If the helper is killed, its ops end after it has been
reaped.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import ContractError
from flexkv.facts.keys import Keys
from flexkv.observe import get_logger
from flexkv.remote.base import Presence
from flexkv.remote.link import HelperLink
from flexkv.remote.messages import MOST_PAGES, Answer, Done, Get, Probe, Progress, Put, Remove
from flexkv.storage.tags import tag_fields
from flexkv.transfer.graph import FailureCause, OpId, OpKind, OpResult, OpStatus, TransferGraph, TransferOp

logger = get_logger(__name__)

MOST_REMOVALS = 256
"""The maximum number of `Remove` messages that wait until the store can be reached. If there are more, the oldest are
dropped. A unit that reads a page whose removal was dropped finds the page missing or still damaged.
"""

LOST = "lost"

Presences = Sequence[NDArray[np.uint8]]
"""For each group, the `Presence` of the leading keys that were looked up; an empty sequence if no answer came in
time.
"""


@dataclass(slots=True)
class RemoteTotals:
    """Running totals of the remote tier.

    Attributes:
        gets, puts: pages by outcome: "ok", "known" (the store had the page before the put), or why the page failed.
            LOST means that the store or the helper was lost, so that the outcome is unknown or the page was not tried.
        lookups: probes by outcome: "hit" (the store has at least one page), "miss", or "unknown" (not answered in time,
            or not for all pages).
        bytes_got, bytes_put: bytes of the values that arrived.
        restarts: how often the helper was restarted.
    """

    gets: Counter[str] = field(default_factory=Counter)
    puts: Counter[str] = field(default_factory=Counter)
    lookups: Counter[str] = field(default_factory=Counter)
    bytes_got: int = 0
    bytes_put: int = 0
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class PlaneLimits:
    """The limits of a `RemotePlane`.

    Attributes:
        queue_ops: maximum number of ops in flight.
        questions: maximum number of probes that the helper has not answered, including those that were given up.
        probe_s: a probe that is not answered within this many seconds is given up.
        keeps_slots: whether the host slots of a killed helper's ops stay out of use, because a network card may still
            write to them.
    """

    queue_ops: int
    questions: int
    probe_s: float
    keeps_slots: bool = False


@dataclass(slots=True)
class Moving:
    """An op in flight.

    Attributes:
        waiting: the op's messages that have not ended. Maps a message's number to the index of the message's first page
            in the op.
        failed, causes: indices of the pages that have failed so far, and the cause of each.
        reason: why the first page failed; empty if none has.
    """

    op: TransferOp
    waiting: dict[int, int] = field(default_factory=dict)
    failed: list[int] = field(default_factory=list)
    causes: list[int] = field(default_factory=list)
    reason: str = ""


class RemotePlane:
    """Carries out a unit's ops and probes on a store. Only the manager's thread calls it, and only `close` waits.

    Args:
        link: the link to the helper. The plane becomes the link's user (`LinkUser`).
        clock: returns monotonic time in seconds.

    Attributes:
        totals: the tier's running totals.
    """

    def __init__(self, link: HelperLink, limits: PlaneLimits, clock: Callable[[], float]) -> None:
        self.link = link
        self._limits = limits
        self._clock = clock
        self.totals = RemoteTotals()
        self._moving: dict[OpId, Moving] = {}
        self._op_of: dict[int, OpId] = {}
        """Maps the number of each message in flight to the message's op."""
        self._seen_s: dict[OpKind, float] = {}
        """When the helper last reported progress for ops of each kind. The helper carries out the ops of a kind one
        after another.
        """
        self._ended: list[OpResult] = []
        self._questions: dict[int, tuple[OpId, float]] = {}
        self._unanswered: set[int] = set()
        """Numbers of the probes that the helper has not answered, including those that were given up."""
        self._answered_s = 0.0
        """When the helper last answered a probe. If a probe is sent while no other probe is unanswered, this is set to
        the time at which the probe was sent.
        """
        self._answers: list[tuple[OpId, Presences]] = []
        self._removals: deque[Remove] = deque(maxlen=MOST_REMOVALS)
        """Removals that wait until the store can be reached and the names of values are known."""
        self._held = False
        link.join(self)

    @property
    def down_reason(self) -> str:
        """Why the store is not used now; empty while it is used."""
        return self.link.breaker.reason

    def watch(self) -> None:
        """Watches the helper, sends waiting removals, and gives up probes that were not answered in time. Call this a
        few times per second.
        """
        self.link.watch()
        self.totals.restarts = max(0, self.link.restarts)
        self._post_removals()
        self._expire_questions()

    # --- ops ---

    def submit(self, graph: TransferGraph) -> int | None:
        """Begins the ops of `graph`, and returns the first op's id. If more than `queue_ops` would be in flight, begins
        none and returns None. If the store is not used now, the ops are cancelled at once.

        Raises:
            ContractError: an op is neither a DISK_READ nor a DISK_WRITE.
        """
        if len(self._moving) + len(graph.ops) > self._limits.queue_ops:
            return None
        for op in graph.ops:
            if op.kind not in (OpKind.DISK_READ, OpKind.DISK_WRITE):
                raise ContractError(f"a store that machines share cannot do {op.kind.name}")
        for op in graph.ops:
            self._begin(op)
        return graph.ops[0].op_id

    def _begin(self, op: TransferOp) -> None:
        moving = self._moving[op.op_id] = Moving(op)
        if not self.link.usable:
            self._end_cancelled(moving, self.down_reason or "closed")
            return
        if not any(other.op.kind is op.kind and other is not moving for other in self._moving.values()):
            self._seen_s[op.kind] = self._clock()
        fields = tag_fields(op.tags)
        for first in range(0, op.pages, MOST_PAGES):
            part = slice(first, first + MOST_PAGES)
            keys = np.ascontiguousarray(fields["key"][part])
            tokens = fields["tokens"][part].astype(np.int32)
            kind = Get if op.kind is OpKind.DISK_READ else Put
            number = self.link.send(kind, op.group, keys, op.slots[part], tokens)
            moving.waiting[number] = first
            self._op_of[number] = op.op_id

    def poll(self) -> list[OpResult]:
        """Returns the results of the ops that have ended since the last call."""
        self.link.poll()
        self._expire_questions()
        ended, self._ended = self._ended, []
        return ended

    def remove(self, group: int, keys: Keys) -> None:
        """Removes these pages from the store, as soon as the store can be reached."""
        for first in range(0, len(keys), MOST_PAGES):
            self._removals.append(Remove(group, keys[first : first + MOST_PAGES]))
        self._post_removals()

    def hold(self) -> None:
        """Holds removals back until `open_for` is called, because the names of values are not known until then."""
        self._held = True

    def open_for(self, weights: bytes) -> None:
        """Makes the helper derive the names of values from the digest of the weights with which pages are computed.
        Sends the removals that were held back.

        Args:
            weights: 32-byte digest of the weights.
        """
        self._held = False
        self.link.name_weights(weights)
        self._post_removals()

    def _post_removals(self) -> None:
        while self._removals and self.link.usable and not self._held:
            self.link.post(self._removals.popleft())

    def _end(self, moving: Moving) -> None:
        op = moving.op
        del self._moving[op.op_id]
        if not moving.failed:
            self._ended.append(OpResult(op.op_id, OpStatus.OK, np.empty(0, np.int32)))
            return
        order = np.argsort(moving.failed, kind="stable")
        failed = np.array(moving.failed, np.int32)[order]
        causes = np.array(moving.causes, np.uint8)[order]
        if len(failed) == op.pages and (causes == FailureCause.NOT_EXECUTED).all():
            self._ended.append(OpResult.cancelled(op.op_id, op.pages, moving.reason))
        else:
            self._ended.append(OpResult(op.op_id, OpStatus.FAILED, failed, moving.reason, causes=causes))

    def _end_cancelled(self, moving: Moving, reason: str) -> None:
        """Ends an op whose outcome is unknown; all its pages count as not moved. Precondition: no byte of the op moves
        any more.
        """
        del self._moving[moving.op.op_id]
        ended = moving.op.pages
        if moving.waiting:
            ended = sum(min(MOST_PAGES, moving.op.pages - first) for first in moving.waiting.values())
        self._count_lost(moving, ended)
        self._ended.append(OpResult.cancelled(moving.op.op_id, moving.op.pages, reason))

    def _count_lost(self, moving: Moving, pages: int) -> None:
        if pages > 0:
            totals = self.totals.gets if moving.op.kind is OpKind.DISK_READ else self.totals.puts
            totals[LOST] += pages

    # --- probes ---

    def ask(self, op_id: OpId, keys: Sequence[Keys], whole: Sequence[bool]) -> bool:
        """Sends a probe that asks which of `keys` the store has; for `whole`, see `Probe`. Returns False if no probe
        was sent, because the store is not used now, or too many probes are unanswered.
        """
        if not self.link.usable or len(self._unanswered) >= self._limits.questions:
            return False
        number = self.link.send(Probe, tuple(of_group.tobytes() for of_group in keys), tuple(whole))
        now_s = self._clock()
        if not self._unanswered:
            self._answered_s = now_s
        self._unanswered.add(number)
        self._questions[number] = (op_id, now_s + self._limits.probe_s)
        return True

    def answers(self) -> list[tuple[OpId, Presences]]:
        """Returns the probes that have ended since the last call, with their answers."""
        answers, self._answers = self._answers, []
        return answers

    def _answer(self, number: int, presences: Presences) -> None:
        question = self._questions.pop(number, None)
        if question is None:
            return  # the probe was given up
        found = np.concatenate(presences) if presences else np.empty(0, np.uint8)
        if (found == Presence.YES).any():
            outcome = "hit"
        else:
            outcome = "unknown" if not len(found) or (found == Presence.UNKNOWN).any() else "miss"
        self.totals.lookups[outcome] += 1
        self._answers.append((question[0], presences))

    def _expire_questions(self) -> None:
        if self._questions:
            now_s = self._clock()
            for number in [number for number, (_, ends_s) in self._questions.items() if now_s > ends_s]:
                self._answer(number, ())

    # --- called by the link ---

    def take(self, message: Done | Answer | Progress) -> None:
        if isinstance(message, Answer):
            self._unanswered.discard(message.number)
            self._answered_s = self._clock()
            self._answer(message.number, message.presences)
            if message.lost:
                self.link.lost(message.lost)
            return
        op_id = self._op_of.get(message.number)
        if op_id is None:
            return
        moving = self._moving[op_id]
        self._seen_s[moving.op.kind] = self._clock()
        if isinstance(message, Done):
            self._take_done(moving, message)

    def _take_done(self, moving: Moving, done: Done) -> None:
        del self._op_of[done.number]
        first = moving.waiting.pop(done.number)
        is_get = moving.op.kind is OpKind.DISK_READ
        totals = self.totals.gets if is_get else self.totals.puts
        totals.update(done.outcomes)
        self._count_lost(moving, min(MOST_PAGES, moving.op.pages - first) - done.outcomes.total())
        moving.failed += (done.failed + first).tolist()
        moving.causes += done.causes.tolist()
        moving.reason = moving.reason or done.reason
        if is_get:
            self.totals.bytes_got += done.bytes
        else:
            self.totals.bytes_put += done.bytes
        if not moving.waiting:
            self._end(moving)
        # Only "failed" counts against the store. If a value was evicted, has expired, or is not the requested page, its
        # key is a miss, which says nothing about the store.
        good, failed = done.outcomes["ok"], done.outcomes["failed"]
        if done.lost:
            self.link.lost(done.lost)
        elif is_get and (why := self.link.breaker.judge(good, failed)):
            self.link.lost(why)

    def lost(self) -> None:
        for number in list(self._questions):
            self._answer(number, ())

    def reaped(self, how: str) -> None:
        self._op_of.clear()
        self._unanswered.clear()
        self.lost()
        if self._limits.keeps_slots and self._moving and not self.link.closed:
            pages = sum(moving.op.pages for moving in self._moving.values())
            logger.error(
                "remote tier: %d host slots stay out of use: a network card may write to them still", pages
            )
            self._moving.clear()
            return
        for moving in list(self._moving.values()):
            self._end_cancelled(moving, how)

    def silent_since(self) -> float | None:
        kinds = {moving.op.kind for moving in self._moving.values() if moving.waiting}
        seen_s = [self._seen_s[kind] for kind in kinds]
        if self._unanswered:
            seen_s.append(self._answered_s)
        return min(seen_s, default=None)

    def close(self, deadline_s: float) -> bool:
        """Ends the helper. Idempotent. Returns False if the helper was not reaped within `deadline_s` seconds; its ops
        then have not ended.
        """
        return self.link.close(deadline_s)
