"""Computes from recorded times which loads and stores ran during an engine's steps, and how long the steps took."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

FEW_TOKENS = 1
"""A step that computes at most this many tokens of other requests is a decoding step, for which the engine uses a CUDA
graph. One token is allowed because, with asynchronous scheduling, an engine computes one more token of another request
than that request asked for.
"""
MOST_LONGEST = 10


@dataclass(frozen=True, slots=True)
class Copy:
    """A load or a store that a connector made.

    Attributes:
        kind: "load" or "store".
        begin_s, end_s: when the copy was submitted, and when the engine got its result.
        pages: number of blocks that the copy moves.
    """

    kind: str
    begin_s: float
    end_s: float
    pages: int


@dataclass(frozen=True, slots=True)
class Step:
    """The time between two successive tokens of the running request, which decodes while other requests come and go.

    Attributes:
        begin_s, end_s: when the engine had the first of these tokens, and when it had the second.
        prefill_tokens: number of tokens of other requests that the step computed.
        running: number of requests in the step.
        launched_tokens: maximum number of tokens of other requests in a batch that the engine launched during the step.
            With asynchronous scheduling an engine launches a batch before it has the result of the previous one.
        adding_s: seconds in which the engine's thread added requests. They do not count as part of the step, because a
            server adds requests in another process.
        connector_s: seconds that scheduler and worker spent in calls of the connector.
    """

    begin_s: float
    end_s: float
    prefill_tokens: int
    running: int
    launched_tokens: int = 0
    adding_s: float = 0.0
    connector_s: float = 0.0

    @property
    def ms(self) -> float:
        return 1e3 * (self.end_s - self.begin_s - self.adding_s)

    @property
    def decodes(self) -> bool:
        return max(self.prefill_tokens, self.launched_tokens) <= FEW_TOKENS


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of the steps' times in milliseconds; None if there are no steps.

    Attributes:
        connector_p50_ms: median of the time that a step spent in calls of the connector.
    """

    steps: int
    p50_ms: float | None = None
    p90_ms: float | None = None
    p99_ms: float | None = None
    max_ms: float | None = None
    connector_p50_ms: float | None = None


def spread(steps: Iterable[Step]) -> Spread:
    steps = list(steps)
    if not steps:
        return Spread(0)
    times = np.array([step.ms for step in steps])
    p50, p90, p99 = (float(np.percentile(times, share)) for share in (50, 90, 99))
    in_connector = float(np.median([1e3 * step.connector_s for step in steps]))
    return Spread(len(times), p50, p90, p99, float(times.max()), in_connector)


def beside(steps: Iterable[Step], copies: Sequence[Copy], kind: str) -> list[Step]:
    """Returns the steps during which a copy of the kind `kind` was in flight."""
    return [step for step in steps if any(copy.kind == kind and _meets(step, copy) for copy in copies)]


def quiet(steps: Iterable[Step], copies: Sequence[Copy]) -> list[Step]:
    """Returns the decoding steps that computed only the running request, and during which no copy was in flight."""
    return [
        step
        for step in steps
        if step.running == 1 and step.decodes and not any(_meets(step, copy) for copy in copies)
    ]


def _meets(step: Step, copy: Copy) -> bool:
    return copy.begin_s < step.end_s and copy.end_s > step.begin_s


def cause(step: Step, steps: Sequence[Step], copies: Sequence[Copy]) -> str:
    """Describes the loads, stores and other work during a step, which may explain its time."""
    found = []
    if step.prefill_tokens:
        found.append(f"computed {step.prefill_tokens} tokens of other requests")
    if step.launched_tokens > FEW_TOKENS:
        found.append(f"launched a batch with {step.launched_tokens} tokens of other requests")
    number = steps.index(step)
    if number and steps[number - 1].prefill_tokens > FEW_TOKENS:
        found.append(f"follows a step of {steps[number - 1].prefill_tokens} such tokens")
    for kind in ("load", "store"):
        during = [copy for copy in copies if copy.kind == kind and _meets(step, copy)]
        begun = sum(copy.begin_s >= step.begin_s for copy in during)
        ended = sum(copy.end_s <= step.end_s for copy in during)
        if during:
            pages = sum(copy.pages for copy in during)
            found.append(f"{len(during)} {kind}s of {pages} blocks in flight ({begun} began, {ended} ended)")
    return "; ".join(found) or "nothing beside it"


def longest(steps: Sequence[Step], copies: Sequence[Copy]) -> list[dict[str, object]]:
    """Returns the MOST_LONGEST longest steps, each with a description of the work during the step."""
    chosen = sorted(steps, key=lambda step: step.ms, reverse=True)[:MOST_LONGEST]
    return [{"ms": round(step.ms, 3), "cause": cause(step, steps, copies)} for step in chosen]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A measured figure and its upper limit.

    Attributes:
        value: the figure; None if it was not measured.
    """

    what: str
    value: float | None
    limit: float

    @property
    def met(self) -> bool | None:
        return None if self.value is None else self.value <= self.limit


def ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or base is None else value / base


def more_than(value: float | None, base: float | None) -> float | None:
    return None if value is None or base is None else value - base
