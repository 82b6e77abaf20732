"""A program that runs an engine with several data-parallel ranks, and sends each prompt to a chosen rank. vLLM's `LLM`
cannot choose the rank.

    python -m tests.engines.ranks_child '{engine arguments}' '[[name, rank, token ids], null, ...]'

For each prompt it prints a line of JSON with name, rank, tokens and cached. At a `null` it drops the ranks' own prefix
caches.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

OUTPUT_TOKENS = 12
RESET_DEADLINE_S = 60.0


async def ask(engine: Any, number: int, rank: int, ids: list[int]) -> dict[str, Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    prompt = {"prompt_token_ids": ids}
    answer: dict[str, Any] = {}
    async for part in engine.generate(prompt, params, f"request-{number}", data_parallel_rank=rank):
        answer = {"tokens": list(part.outputs[0].token_ids), "cached": part.num_cached_tokens or 0}
    return answer


async def forget(engine: Any) -> None:
    """Drops the ranks' own prefix caches. It repeats the call, because vLLM refuses it while a block is referenced."""
    while not await engine.reset_prefix_cache():
        await asyncio.sleep(0.1)


async def run(arguments: dict[str, Any], orders: list[Any]) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    try:
        for number, order in enumerate(orders):
            if order is None:
                await asyncio.wait_for(forget(engine), RESET_DEADLINE_S)
                continue
            name, rank, ids = order
            answer = await ask(engine, number, rank, ids)
            print(json.dumps({"name": name, "rank": rank, **answer}), flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    import demo.engine_preload  # noqa: F401 - imported here because the ranks' processes are forked from this one

    asyncio.run(run(json.loads(sys.argv[1]), json.loads(sys.argv[2])))
