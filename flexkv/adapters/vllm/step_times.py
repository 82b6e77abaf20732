"""Measures on the scheduler's side how long the engine's prefill steps take, from a step's plan to the report of its
outcome."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from flexkv.cache.ledger.cost import LinearFit

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

MIN_PREFILL_TOKENS = 64
"""A step with fewer prompt tokens counts as a decode step, because it would take about as long without them."""

MIN_CHUNK_TOKENS = 16
"""A request with fewer tokens in a step counts as decoding, even if some of them are drafts."""

MAX_STEPS = 64
"""Largest number of steps in flight that are remembered. An engine has two or three."""


class StepTimes:
    """Fits the duration of prefill steps as a linear function of their number of tokens.

    If a step was planned while an earlier one was in flight, its time begins when the earlier step ends. Steps in which
    the worker waits for a load are left out, because their durations do not measure computation.
    """

    def __init__(self, line: LinearFit, clock: Callable[[], float] = time.monotonic) -> None:
        self._line = line
        self._clock = clock
        self._begun: deque[tuple[int, float, int]] = deque(maxlen=MAX_STEPS)
        self._last_end_s = 0.0

    def began(self, step: int, output: SchedulerOutput, waits_for_load: bool) -> None:
        """Records that a step with a forward pass was planned. Costs O(requests)."""
        chunks = output.num_scheduled_tokens.values()
        prefill = sum(tokens for tokens in chunks if tokens >= MIN_CHUNK_TOKENS)
        counts = prefill >= MIN_PREFILL_TOKENS and not waits_for_load
        total = output.total_num_scheduled_tokens if counts else 0
        self._begun.append((step, self._clock(), total))

    def ended(self, step: int) -> None:
        """Records that the outcome of `step`, and thus of all earlier steps, was reported."""
        now_s = self._clock()
        while self._begun and self._begun[0][0] <= step:
            number, begun_s, tokens = self._begun.popleft()
            if number == step and tokens:
                self._line.see(tokens, now_s - max(begun_s, self._last_end_s), now_s)
        self._last_end_s = now_s
