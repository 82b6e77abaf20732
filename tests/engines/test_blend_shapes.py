"""Blended prompts with segments that repeat, touch, are short or many, or end anywhere in a block or chunk."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

from demo.model import prompt_tokens

from .blend_world import Documents, results, start_blending, steps_of
from .conftest import Engines
from .session import EngineSession, Prompt

ROUNDING = 1e-4
ROWS = "vllm:flexkv_blend_rows_total{{kind={}}}"


@dataclass(frozen=True)
class Shape:
    """The shape of one blended prompt.

    Attributes:
        sizes: number of tokens of each segment.
        order: indexes of the segments that the prompt contains, in the prompt's order.
        gaps: for each segment in the prompt, number of tokens between it and the previous segment.
        tail: number of tokens after the last segment.
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    gaps: tuple[int, ...]
    tail: int

    def documents(self, stream: int) -> Documents:
        segments = [tuple(prompt_tokens(size, stream + number)) for number, size in enumerate(self.sizes, 1)]
        tokens: list[int] = []
        spans = []
        for number, (which, gap) in enumerate(zip(self.order, self.gaps, strict=True)):
            tokens += prompt_tokens(gap, stream + 900 + number) if gap else []
            spans.append((len(tokens), len(tokens) + len(segments[which])))
            tokens += segments[which]
        tokens += prompt_tokens(self.tail, stream + 890) if self.tail else []
        return Documents(tuple(segments), Prompt(tuple(tokens), log_probabilities=True), tuple(spans))


SHAPES = {
    "one segment several times": Shape((40, 55), (0, 1, 0, 0, 1), (3, 0, 0, 5, 1), 20),
    "shorter than a page": Shape((1, 3, 7, 15, 33), (0, 1, 2, 3, 4, 0, 1), (2, 1, 0, 0, 1, 3, 2), 9),
    "at its own place": Shape((64, 17), (0, 1), (0, 3), 11),
    "nothing else": Shape((64, 31), (0, 1), (0, 0), 0),
    "ends of pages": Shape((16, 32, 48), (2, 0, 1), (0, 16, 32), 16),
    "one more token": Shape((63,), (0,), (0,), 1),
    "many": Shape(tuple(range(40, 72)), tuple(range(31, -1, -1)), (1,) * 32, 9),
}


@pytest.fixture
def session(engines: Engines) -> EngineSession:
    return start_blending(engines)


@pytest.mark.parametrize("chunk", [0, 37])
@pytest.mark.parametrize("name", SHAPES)
def test_segments_of_any_shape_are_blended_right(
    session: EngineSession, stream: int, name: str, chunk: int
) -> None:
    documents = SHAPES[name].documents(stream % 10_000_000)
    documents.store(session)
    before = results(session)
    had = {kind: session.metric(ROWS.format(kind)) for kind in ("reused", "computed", "unplaced")}
    with steps_of(session, chunk):
        [full] = session.ask(documents.plain())
        [same] = session.ask(documents.blended(1.0))
        found = session.call(
            "blend_oracle",
            full=documents.plain().wire(),
            blended=documents.blended(0.15).wire(),
            share=0.3,
        )
        session.ask(documents.blended(0.0))
    assert (same.tokens, same.log_probabilities) == (full.tokens, full.log_probabilities)
    assert found["worst"] < ROUNDING
    assert dict(Counter(results(session)) - Counter(before)) == {"blended": 3}
    covered = sum(end - first for first, end in documents.spans)
    rows = {kind: session.metric(ROWS.format(kind)) - count for kind, count in had.items()}
    assert rows["unplaced"] == 0, "a chunk without any covered row has nothing to place"
    assert rows["reused"] + rows["computed"] == 3 * covered
    session.settle()
    assert session.call("blend_held") == {"live": 0, "pages": 0, "loads": 0, "staged": 0}


def test_a_caller_who_skips_the_prefix_cache_is_blended_too(session: EngineSession, stream: int) -> None:
    """A blended request may skip the engine's prefix cache, although vLLM does not let such a request wait for a
    connector."""
    documents = SHAPES["one more token"].documents(stream % 10_000_000)
    documents.store(session)
    before, had = results(session), session.metric(ROWS.format("reused"))
    session.call("blend_skipping", request=documents.blended(0.0).wire())
    assert dict(Counter(results(session)) - Counter(before)) == {"blended": 1}
    assert session.metric(ROWS.format("reused")) - had == 63
