"""Makes one OpenTelemetry span per op if the process traces; the engine's provider receives it.

Uses OpenTelemetry if it is installed: vLLM brings it, and sets a provider before it makes its connector.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

try:
    from opentelemetry import trace as trace
except ImportError:  # not every engine brings it
    trace = None  # type: ignore[assignment]

TRACER = "flexkv"
REQUEST_ID = "gen_ai.request.id"
"""The name that vLLM's own spans use, so that one search finds both."""

AttributeValue = str | int | list[str]


class OpSpans:
    """Makes spans of ended ops, if a tracer provider was set before this object was made.

    Attributes:
        wanted: whether one was set.
    """

    def __init__(self) -> None:
        self.wanted = trace is not None and not isinstance(
            trace.get_tracer_provider(), trace.ProxyTracerProvider
        )

    def ended(
        self, name: str, seconds: float, attributes: Mapping[str, AttributeValue], failure: str = ""
    ) -> None:
        """Makes the span of an op that has just ended. Precondition: spans are `wanted`.

        Args:
            name: what the op moves, and between which tiers; one of a small fixed set.
            seconds: how long ago the op was planned.
            failure: why some of its pages failed; empty if none did.
        """
        end_ns = time.time_ns()
        span = trace.get_tracer(TRACER).start_span(
            f"flexkv {name}", start_time=end_ns - int(seconds * 1e9), attributes=dict(attributes)
        )
        if failure:
            span.set_status(trace.StatusCode.ERROR, failure)
        span.end(end_time=end_ns)
