"""Makes one OpenTelemetry span per op if the engine's process is traced. The engine's tracer provider receives them.

Uses OpenTelemetry if it is installed. vLLM installs it, and sets a tracer provider before it makes its connector.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

try:
    from opentelemetry import trace as trace
except ImportError:  # not every engine installs it
    trace = None  # type: ignore[assignment]

TRACER = "flexkv"
REQUEST_ID = "gen_ai.request.id"
"""Attribute with the request's id. vLLM's own spans use the same name, so one search finds both."""

AttributeValue = str | int | list[str]


class OpSpans:
    """Makes spans of finished ops, if a tracer provider was set before this object was made.

    Attributes:
        wanted: whether a tracer provider was set.
    """

    def __init__(self) -> None:
        self.wanted = trace is not None and not isinstance(
            trace.get_tracer_provider(), trace.ProxyTracerProvider
        )

    def ended(
        self, name: str, seconds: float, attributes: Mapping[str, AttributeValue], failure: str = ""
    ) -> None:
        """Makes the span of an op that has just finished. Precondition: `wanted` is true.

        Args:
            name: what the op moves, and between which tiers; one of a small fixed set of texts.
            seconds: how long ago the op was planned.
            failure: why some of the op's pages failed; empty if none failed.
        """
        end_ns = time.time_ns()
        span = trace.get_tracer(TRACER).start_span(
            f"flexkv {name}", start_time=end_ns - int(seconds * 1e9), attributes=dict(attributes)
        )
        if failure:
            span.set_status(trace.StatusCode.ERROR, failure)
        span.end(end_time=end_ns)
