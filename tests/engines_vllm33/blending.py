"""Cases of blending. A prompt contains documents that were computed one by one, but in a different order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from demo.model import prompt_tokens
from tests.engines.broken_mask import one_sequence_of
from tests.engines_vllm33.cases import Found, Transfer, case
from tests.engines_vllm33.engine import ANSWER_TOKENS, Engine

BLENDING = {"architectures": ["FlexKVLlamaForCausalLM"]}

_salts = itertools.count()


def _blend(lab: Engine, ids: list[int], ask: dict[str, Any], tokens: int = ANSWER_TOKENS) -> list[Any]:
    return lab.run([ids], tokens, {"flexkv.blend": ask}, f"flexkv-blend:{next(_salts)}")


@case
def blended(
    model: str, transfer: Transfer = None, sizes: Sequence[int] = (), broken: bool = False, **engine: Any
) -> Found:
    """Computes a prompt in full, then blends it with a ratio of 1 and with a ratio of a third.

    Args:
        sizes: number of tokens of each document.
        broken: for a control, attention treats the kept rows of a request as one causal sequence.
    """
    from flexkv.adapters.vllm.blend.rows import Runs

    with patch.object(Runs, "of", one_sequence_of(Runs.of) if broken else Runs.of):
        lab = Engine(model, transfer, hf_overrides=BLENDING, **engine)
        documents = [prompt_tokens(size, 80 + number) for number, size in enumerate(sizes)]
        prompt, segments = prompt_tokens(8, 90), []
        for document in reversed(documents):
            segments.append([len(prompt), len(prompt) + len(document)])
            prompt = [*prompt, *document]
        prompt = [*prompt, *prompt_tokens(28, 91)]
        for document in documents:
            _blend(lab, document, {"store": True}, 1)
        lab.note("full", lab.run([prompt], salt="computed"))
        rows = {}
        for phase, ratio in (("one", 1.0), ("third", 0.33)):
            before = _rows()
            lab.note(phase, _blend(lab, prompt, {"segments": segments, "ratio": ratio}))
            rows[phase] = {kind: count - before.get(kind, 0.0) for kind, count in _rows().items()}
        return lab.end(rows=rows, results=_by_label("flexkv_blend_requests", "result"))


def _rows() -> dict[str, float]:
    return _by_label("flexkv_blend_rows", "kind")


def _by_label(metric: str, label: str) -> dict[str, float]:
    from prometheus_client import REGISTRY

    found: dict[str, float] = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name == f"vllm:{metric}_total":
                found[sample.labels[label]] = found.get(sample.labels[label], 0.0) + sample.value
    return found
