"""Documents and prompts for engines that blend."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from demo.model import prompt_tokens

from .conftest import Engines, connector
from .session import EngineSession, Prompt

SEPARATOR = 5
SIZES = (96, 75, 128)
_salts = itertools.count()


def salt() -> str:
    return f"flexkv-blend:{next(_salts)}"


@contextlib.contextmanager
def steps_of(session: EngineSession, tokens: int) -> Iterator[None]:
    """Within the `with` block, limits the engine to `tokens` tokens per step. If `tokens` is 0, the usual limit
    stays."""
    usual = session.call("step_tokens", tokens=tokens)["before"] if tokens else 0
    try:
        yield
    finally:
        if usual:
            session.call("step_tokens", tokens=usual)


@dataclass(frozen=True)
class Documents:
    """Documents, which the engine stores as segments, and a prompt that contains them in reverse order, with other
    tokens before and after them.

    Attributes:
        spans: first and end position of each segment in the prompt, in the prompt's order.
    """

    segments: tuple[tuple[int, ...], ...]
    prompt: Prompt
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, stream: int, sizes: tuple[int, ...] = SIZES, **fields: Any) -> Documents:
        segments = [tuple(prompt_tokens(size, stream + 1 + number)) for number, size in enumerate(sizes)]
        tokens, spans = list(prompt_tokens(8, stream + 20)), []
        for segment in reversed(segments):
            tokens.append(SEPARATOR)
            spans.append((len(tokens), len(tokens) + len(segment)))
            tokens += segment
        tokens += [SEPARATOR, *prompt_tokens(28, stream + 30)]
        fields.setdefault("log_probabilities", True)
        return cls(tuple(segments), Prompt(tuple(tokens), **fields), tuple(spans))

    def store(self, session: EngineSession) -> None:
        """Makes the engine compute each segment separately and store it."""
        asks = [
            Prompt(segment, max_tokens=1, salt=salt(), extra=blending({"store": True}))
            for segment in self.segments
        ]
        for ask in asks:
            session.ask(ask)
        session.settle()  # a segment is counted only after every rank has stored it

    def blended(self, ratio: float | None = None, spans: Any = None, **fields: Any) -> Prompt:
        """Makes a request that asks to blend the prompt. Unless `fields` contains a salt, the request gets a new
        one."""
        ask: dict[str, Any] = {"segments": [list(span) for span in (self.spans if spans is None else spans)]}
        if ratio is not None:
            ask["ratio"] = ratio
        return replace(self.prompt, **{"salt": salt(), "extra": blending(ask)} | fields)

    def plain(self, **fields: Any) -> Prompt:
        """Makes a request for the same prompt that is not blended. Its salt is new, so the engine computes the whole
        prompt."""
        return replace(self.prompt, **{"salt": f"plain-{next(_salts)}"} | fields)


def blending(ask: Any) -> dict[str, Any]:
    return {"kv_transfer_params": {"flexkv.blend": ask}}


def blending_connector(
    settings: dict[str, Any] | None = None, names: dict[str, str] | None = None
) -> dict[str, Any]:
    """Makes the `kv_transfer_config` of an engine that blends.

    Args:
        settings: more settings of flexkv, by dotted name.
        names: for some of flexkv's settings, the alternative name under which to pass them.
    """
    given: dict[str, Any] = {
        "blend.enabled": True,
        "blend.bytes": 16 << 20,
        "blend.min_tokens": 32,
        "blend.separators": [[SEPARATOR]],
    } | (settings or {})
    named = {(names or {}).get(key, key): value for key, value in given.items()}
    return connector(None, **{key.replace(".", "__"): value for key, value in named.items()})


def start_blending(
    engines: Engines,
    settings: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    names: dict[str, str] | None = None,
    **engine: Any,
) -> EngineSession:
    """Starts an engine that blends. If the engine that was started last has the same configuration, returns that one.

    Args:
        settings, names: see `blending_connector`.
        engine: more engine arguments.
    """
    config = blending_connector(settings, names)
    overrides = {"architectures": [engine.pop("architecture", "FlexKVLlamaForCausalLM")]}
    return engines.get(config, environment, hf_overrides=overrides, **engine)


def results(session: EngineSession) -> dict[str, float]:
    """Returns how many requests so far had each result. Leaves out results that no request had."""
    family = "vllm:flexkv_blend_requests_total"
    found = session.process.metrics(family)
    return {key.partition("result=")[2].rstrip("}"): value for key, value in found.items() if value}


def new_results(session: EngineSession, before: dict[str, float]) -> dict[str, float]:
    """Returns how many requests had each result since `results` returned `before`."""
    return dict(Counter(results(session)) - Counter(before))
