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
    """The one method of `Counters` that this module needs. `Counters` itself cannot be imported, because it imports the
    metrics, which import this module.
    """

    def add(self, name: str, amount: float = 1, **labels: str) -> None: ...


class PageLoss(Enum):
    """One reason why a page is not stored, or why a stored page is not served.

    Attributes:
        metric: name of the counter of pages that are lost for this reason.
        reason: the value of that counter's label `reason`; empty if the counter has only one reason.
        words: what happened, for the operator.
    """

    BUSY = NOT_STORED, "busy", "the queue of stores of a rank was full, or the rank had no host memory yet"
    BROKEN_STEP = (
        NOT_STORED,
        "broken_step",
        "a step broke off after their request had begun, so their content is unknown",
    )
    ENDED = (
        NOT_STORED,
        "ended",
        "their request ended, and the engine does not say what then becomes of its blocks",
    )
    HOLD_EXPIRED = (
        NOT_STORED,
        "hold_expired",
        "they waited until `store.hold_s` was over, or until another request with the same id began",
    )
    NO_SLOT = NOT_STORED, "no_slot", "host memory had no free slot, or too many pages had a store in flight"
    PREEMPTED = NOT_STORED, "preempted", "the engine preempted their request"
    REFERENCE_LIMIT = (
        NOT_STORED,
        "reference_limit",
        "too many blocks that no request holds had a store in flight (`store.max_reference_share`)",
    )
    RELEASED = NOT_STORED, "released", "the engine released its KV memory in order to sleep"
    RESET = NOT_STORED, "reset", "the weights changed, or the engine reset its own cache"
    REUSED = NOT_STORED, "reused", "the engine reused the blocks after their request's end"
    LAZY_MISSED = (
        "flexkv_lazy_missed_pages_total",
        "",
        "the engine evicted or dropped them before a lazy store could take them",
    )
    UNPUBLISHED = (
        "flexkv_unpublished_pages_total",
        "",
        "they were stored but not published, because their copy failed, a load that their step read failed, or the "
        "weights changed",
    )

    MOVE_FAILED = (
        NOT_MOVED,
        "failed",
        "the copy failed, its bytes were not those that were stored, or the engine reused the block too soon",
    )
    MOVE_SKIPPED = NOT_MOVED, "skipped", "an operation for which they waited failed"
    LANE_DOWN = NOT_MOVED, "lane_down", "the thread or device that moves them is out of use"
    DEADLINE = NOT_MOVED, "deadline", "they did not arrive within `load.deadline_s`"
    CANCELLED = (
        "flexkv_cancelled_pages_total",
        "",
        "they were cancelled, which is not a failure: a client disconnected, the cache was reset, the engine went to "
        "sleep or ended, or SGLang's queue of loads stayed full",
    )
    NO_ROOM = (
        "flexkv_no_room_pages_total",
        "",
        "until their request's wait was over, host memory had no slots for them or too many pages were being read",
    )
    EXPIRED = "flexkv_expired_pages_total", "", "they left host memory because their time to live was over"

    DISK_BUSY = NOT_ON_DISK, "busy", "the queue of writes or the tier was full"
    DISK_EVICTED = (
        NOT_ON_DISK,
        "evicted",
        "they left host memory, or the engine ended, before they were written",
    )
    DISK_GONE = (
        NOT_ON_DISK,
        "disk",
        "their disk failed, or no disk was in use when they should have been written",
    )
    DISK_EXPIRED = (
        "flexkv_disk_expired_pages_total",
        "",
        "they were found on disk after their time to live was over",
    )
    DISK_LEFT = (
        "flexkv_disk_left_pages_total",
        "",
        "they were left to the engine, because it computes them sooner",
    )

    REMOTE_BUSY = NOT_WRITTEN, "busy", "the queue of writes was full, or the store could not be reached"
    REMOTE_FULL = NOT_WRITTEN, "full", "the store was full"
    REMOTE_FAILED = NOT_WRITTEN, "failed", "the store did not accept them"
    REMOTE_KNOWN = NOT_WRITTEN, "known", "the store had them already, so nothing is lost"
    REMOTE_ABSENT = NOT_READ, "absent", "the store did not have them any more when they were read"
    REMOTE_SIZE = NOT_READ, "size", "the store returned a value of another length"
    REMOTE_CONTENT = NOT_READ, "content", "the store returned damaged bytes or another page"
    REMOTE_EXPIRED = NOT_READ, "expired", "their time to live was over"
    REMOTE_LATE = NOT_READ, "failed", "the store failed to return them in time"

    SEGMENT_ABSENT = NOT_BLENDED, "absent", "no tier had them"
    SEGMENT_LATE = NOT_BLENDED, "late", "they were not read from disk in time"
    SEGMENT_NO_ROOM = NOT_BLENDED, "room", "they were on disk, and host memory had no space for them"
    SEGMENT_UNREADABLE = NOT_BLENDED, "unreadable", "they were damaged or could not be read from disk"

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
            labels: the counter's labels other than the reason, such as a direction.
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
