"""The reasons why a lookup does not promise the next block of a request. Metrics, documentation and the control plane
share this list.
"""

from __future__ import annotations

from enum import Enum


class MissReason(Enum):
    """One reason why a lookup does not promise the next block of a request. A new reason needs a line in this class,
    and code in `flexkv/cache/promise/` that detects it.

    Attributes:
        reason: the value of the label `reason` of `flexkv_missed_blocks_total`.
        words: what happened, for the operator.
    """

    ABSENT = "absent", "no tier in use has the next block, or a store is still filling it"
    EXPIRED = "expired", "the page of the next block was cached until its time to live was over"
    OFF = "off", "the cache is disabled, or a reset has not finished"
    ASKED = "asked", "the request's own settings allow no more, or exclude the tier that has the next block"
    FAILED_LOAD = "failed_load", "a load of this request, or recently of any request, did not bring its pages"
    QUEUE_FULL = "queue_full", "as many pages are promised or being loaded as `load.inflight_pages` allows"
    NO_ROOM = (
        "no_room",
        "host memory cannot hold the next blocks too, or had no slots for them while the request waited",
    )
    LATE = "late", "a tier took too long to answer or to bring the next blocks"
    COMPUTED_SOONER = "computed_sooner", "the engine computes the next blocks sooner than a tier brings them"

    def __init__(self, reason: str, words: str) -> None:
        self.reason = reason
        self.words = words


def markdown_table() -> str:
    """Returns the table of reasons for the documentation."""
    rows = ["| reason | why no more was promised |", "|---|---|"]
    rows += [f"| `{miss.reason}` | {miss.words} |" for miss in MissReason]
    return "\n".join(rows)
