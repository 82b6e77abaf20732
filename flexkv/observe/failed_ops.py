"""Warns about failed ops. Each warning says which op failed, between which tiers, how many pages failed and why. The
number of warnings is limited, so that the log of a storm of failures stays readable.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

MOST_LINES = 10
"""Maximum number of warnings per kind of op within `PERIOD_S`. Ten show whether failures are alike, while thousands of
ops may fail within seconds.
"""

PERIOD_S = 60.0


@dataclass(slots=True)
class _Period:
    """Number of warnings that were logged for one kind of op since `began_s`, and number of failures that were not
    logged.
    """

    began_s: float
    lines: int = 0
    left_out_ops: int = 0
    left_out_pages: int = 0


class FailedOps:
    """Logs failed ops, at most `MOST_LINES` per kind of op and period. Further failures are only counted. Thread-safe.

    Args:
        clock: returns a monotonic time in seconds.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._lock = threading.Lock()
        self._periods: dict[str, _Period] = {}

    def warn(self, kind: str, name: str, failed: int, pages: int, reason: str) -> None:
        """Logs or counts one failed op.

        Args:
            kind: what the op moves, and between which tiers; one of a small fixed set of texts.
            name: which op it is, and for which request.
            failed: number of pages that failed.
            pages: number of pages of the op.
            reason: what went wrong; empty if that is unknown.
        """
        with self._lock:
            period = self._periods.get(kind)
            if period is None or self._clock() - period.began_s >= PERIOD_S:
                self._say_left_out(kind, period)
                period = self._periods[kind] = _Period(self._clock())
            if period.lines == MOST_LINES:
                period.left_out_ops += 1
                period.left_out_pages += failed
                return
            period.lines += 1
            self._logger.warning(
                "%s, %s: %d of %d pages failed: %s",
                kind,
                name,
                failed,
                pages,
                reason or "no reason was given",
            )

    def flush(self, at_end: bool = False) -> None:
        """Logs how many failures were left out in periods that are over. If `at_end` is true, includes periods that are
        not over yet."""
        with self._lock:
            for kind, period in list(self._periods.items()):
                if at_end or self._clock() - period.began_s >= PERIOD_S:
                    self._say_left_out(kind, period)
                    del self._periods[kind]

    def _say_left_out(self, kind: str, period: _Period | None) -> None:
        if period is not None and period.left_out_ops:
            self._logger.warning(
                "%s: %d more failed, %d pages, within %.0f s of the %d that were named",
                kind,
                period.left_out_ops,
                period.left_out_pages,
                self._clock() - period.began_s,
                period.lines,
            )
