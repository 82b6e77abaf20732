"""An operation on an engine that blends: it sends a request with settings that other operations of these tests cannot
send."""

from __future__ import annotations

import time
from typing import Any

from demo.engine_child import Operation


def blend_scored(llm: Any, request: dict[str, Any], tokens: list[int] | None = None) -> dict[str, Any]:
    """Sends a request that also asks for the log probabilities of its prompt.

    Returns the answer's tokens, and the log probability of each token of the prompt except the first.
    """
    from vllm import SamplingParams

    name, engine = f"s{time.monotonic_ns()}", llm.llm_engine
    params = SamplingParams(
        temperature=0,
        max_tokens=request["max_tokens"],
        ignore_eos=True,
        extra_args=request.get("extra"),
        prompt_logprobs=0,
    )
    prompt = {"prompt_token_ids": request["ids"], "cache_salt": request["salt"]}
    engine.add_request(name, prompt, params)
    found: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                scores = zip(request["ids"][1:], output.prompt_logprobs[1:], strict=True)
                found = {
                    "tokens": list(output.outputs[0].token_ids),
                    "scores": [of[token].logprob for token, of in scores],
                }
    return found


OPERATIONS: dict[str, Operation] = {"blend_scored": blend_scored}
