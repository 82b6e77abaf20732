"""One OpenTelemetry span per op, where the process traces: the engine's own provider takes it.

OpenTelemetry is used when it is there: vLLM brings it, and sets a provider before it makes its connector.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

try:
    from opentelemetry import trace as trace
except ImportError:  # not brought by every engine
    trace = None  # type: ignore[assignment]

TRACER = "flexkv"
REQUEST_ID = "gen_ai.request.id"
"""As vLLM's own spans name it, so that one search finds both."""

AttributeValue = str | int | list[str]


class OpSpans:
    """Makes spans of ops that have ended, if a tracer provider was set before it was made.

    Attributes:
        wanted: whether one was.
    """

    def __init__(self) -> None:
        self.wanted = trace is not None and not isinstance(
            trace.get_tracer_provider(), trace.ProxyTracerProvider
        )

    def ended(
        self, name: str, seconds: float, attributes: Mapping[str, AttributeValue], failure: str = ""
    ) -> None:
        """An op has ended just now; only where spans are `wanted`.

        Args:
            name: what it moves, and between which tiers; of a small fixed set.
            seconds: how long ago it was planned.
            failure: why pages of it failed; empty where none did.
        """
        end_ns = time.time_ns()
        span = trace.get_tracer(TRACER).start_span(
            f"flexkv {name}", start_time=end_ns - int(seconds * 1e9), attributes=dict(attributes)
        )
        if failure:
            span.set_status(trace.StatusCode.ERROR, failure)
        span.end(end_time=end_ns)
