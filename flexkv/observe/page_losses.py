"""The only list of reasons why a page is not stored, or why a stored page is not served. Labels of metrics and a table
in the documentation are made from it.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

NOT_STORED = "flexkv_dropped_store_pages_total"
NOT_MOVED = "flexkv_failed_pages_total"
NOT_ON_DISK = "flexkv_disk_lost_pages_total"
NOT_WRITTEN = "flexkv_remote_dropped_pages_total"
NOT_READ = "flexkv_remote_missed_pages_total"
NOT_BLENDED = "flexkv_blend_missed_pages_total"


class Adds(Protocol):
    """The one method of `Counters` that is needed here. `Counters` itself cannot be imported: it imports the metrics,
    which import these reasons.
    """

    def add(self, name: str, amount: float = 1, **labels: str) -> None: ...


class PageLoss(Enum):
    """One reason.

    Attributes:
        metric: name of the counter of pages that are lost for this reason.
        reason: the value of that counter's label `reason`; empty if the counter has only one reason.
        words: what happened, for the operator.
    """

    BUSY = NOT_STORED, "busy", "the queue of stores of a rank was full, or the rank had no host memory yet"
    BROKEN_STEP = (
        NOT_STORED,
        "broken_step",
        "a step broke off after their request had begun, so nobody knows what they hold",
    )
    ENDED = NOT_STORED, "ended", "their request ended, and nothing tells what becomes of its blocks then"
    HOLD_EXPIRED = NOT_STORED, "hold_expired", "`store.hold_s` was over before there was room"
    NO_SLOT = NOT_STORED, "no_slot", "no slot of host memory, or no place in flight, was free"
    PREEMPTED = NOT_STORED, "preempted", "the engine preempted their request"
    REFERENCE_LIMIT = (
        NOT_STORED,
        "reference_limit",
        "too many blocks that no request holds had a store in flight (`store.max_reference_share`)",
    )
    RELEASED = NOT_STORED, "released", "the engine took its KV memory away for a sleep"
    RESET = NOT_STORED, "reset", "the weights changed, or the engine reset its own cache"
    REUSED = NOT_STORED, "reused", "the engine needed the blocks after their request's end"
    LAZY_MISSED = (
        "flexkv_lazy_missed_pages_total",
        "",
        "the engine evicted them before a lazy store found a place for them",
    )
    UNPUBLISHED = (
        "flexkv_unpublished_pages_total",
        "",
        "stored and thrown away: their copy or a load that their step read failed, or the weights changed",
    )

    MOVE_FAILED = NOT_MOVED, "failed", "the copy failed, or its bytes were not those that were stored"
    MOVE_SKIPPED = NOT_MOVED, "skipped", "what they waited for failed"
    LANE_DOWN = NOT_MOVED, "lane_down", "the thread or device that moves them is out of use"
    DEADLINE = NOT_MOVED, "deadline", "they did not arrive within `load.deadline_s`"
    CANCELLED = (
        "flexkv_cancelled_pages_total",
        "",
        "called off: a client hung up, a reset or a sleep came, SGLang's queue of loads stayed full, the engine ended; "
        "no failure",
    )
    NO_ROOM = (
        "flexkv_no_room_pages_total",
        "",
        "host memory had no slot for them, or too many were being read, for as long as their request waits",
    )
    EXPIRED = "flexkv_expired_pages_total", "", "left host memory because their time to live was over"

    DISK_BUSY = NOT_ON_DISK, "busy", "the queue of writes was full"
    DISK_EVICTED = NOT_ON_DISK, "evicted", "they left host memory before they were written"
    DISK_GONE = NOT_ON_DISK, "disk", "their disk failed"
    DISK_EXPIRED = "flexkv_disk_expired_pages_total", "", "found on disk past their time to live"
    DISK_LEFT = "flexkv_disk_left_pages_total", "", "left to the engine, because it computes them sooner"

    REMOTE_BUSY = NOT_WRITTEN, "busy", "the queue of writes was full, or the store was not there"
    REMOTE_FULL = NOT_WRITTEN, "full", "the store has no room"
    REMOTE_FAILED = NOT_WRITTEN, "failed", "the store did not take them"
    REMOTE_KNOWN = NOT_WRITTEN, "known", "the store had them: nothing is lost"
    REMOTE_ABSENT = NOT_READ, "absent", "gone from the store by the time they were read"
    REMOTE_SIZE = NOT_READ, "size", "the store gave another length"
    REMOTE_CONTENT = NOT_READ, "content", "the store gave damaged bytes or another page"
    REMOTE_EXPIRED = NOT_READ, "expired", "past their time to live"
    REMOTE_LATE = NOT_READ, "failed", "the store did not give them in time"

    SEGMENT_ABSENT = NOT_BLENDED, "absent", "not cached, on no tier"
    SEGMENT_LATE = NOT_BLENDED, "late", "not read from disk in time"
    SEGMENT_NO_ROOM = NOT_BLENDED, "room", "host memory had no room for what is on disk"
    SEGMENT_UNREADABLE = NOT_BLENDED, "unreadable", "damaged or not readable on disk"

    def __init__(self, metric: str, reason: str, words: str) -> None:
        self.metric = metric
        self.reason = reason
        self.words = words

    @property
    def labels(self) -> dict[str, str]:
        """The label of the counter that gives this reason; empty if the counter has only one reason."""
        return {"reason": self.reason} if self.reason else {}

    def count(self, counters: Adds, pages: int, **labels: str) -> None:
        """Counts pages that were lost for this reason.

        Args:
            labels: other labels of the counter, such as a direction.
        """
        if pages > 0:
            counters.add(self.metric, pages, **labels, **self.labels)


def reasons_of(metric: str) -> tuple[str, ...]:
    """Returns the values of a counter's label `reason`."""
    return tuple(loss.reason for loss in PageLoss if loss.metric == metric)


def markdown_table() -> str:
    """Returns the table of reasons for the documentation."""
    rows = ["| metric | reason | what happened to the pages |", "|---|---|---|"]
    for loss in PageLoss:
        rows.append(f"| `{loss.metric}` | {loss.reason and f'`{loss.reason}`'} | {loss.words} |")
    return "\n".join(rows)
