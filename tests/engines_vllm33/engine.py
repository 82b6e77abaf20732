"""One vLLM 0.33 in this process, steered step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

BLOCK_TOKENS = 16
POOL_BLOCKS = 256
DEADLINE_S = 120.0
SPOILT = 0x7F

ARGUMENTS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 1024,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 8,
    "block_size": BLOCK_TOKENS,
    "num_gpu_blocks_override": POOL_BLOCKS,
    "kv_cache_memory_bytes": 1 << 26,
    "gpu_memory_utilization": 0.05,
    "attention_backend": "FLASH_ATTN",
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "disable_log_stats": False,
    "seed": 0,
}


@dataclass
class Request:
    tokens: list[int] = field(default_factory=list)
    cached: int | None = None
    ended: bool = False


class Engine:
    """An engine whose core is in this process, unless VLLM_ENABLE_V1_MULTIPROCESSING is 1.

    Args:
        arguments: arguments of `vllm.LLM`, which override `ARGUMENTS`.
    """

    def __init__(self, model: str, transfer: Mapping[str, Any] | None = None, **arguments: Any) -> None:
        from vllm import LLM

        if transfer is not None:
            arguments["kv_transfer_config"] = dict(transfer)
        self.llm = LLM(model=model, **{**ARGUMENTS, **arguments})
        self.requests: dict[str, Request] = {}
        self._added = 0

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    def facts(self) -> dict[str, Any]:
        config = self.llm.llm_engine.vllm_config
        return {
            "v2": bool(config.use_v2_model_runner),
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "device": str(config.device_config.device_type),
            "layout": str(config.cache_config.kv_cache_layout),
        }

    def add(self, ids: Sequence[int], tokens: int, salt: str = "") -> str:
        from vllm import SamplingParams

        self._added += 1
        name = f"r{self._added}"
        prompt = {"prompt_token_ids": list(ids)} | ({"cache_salt": salt} if salt else {})
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        self.requests[name] = Request()
        self.llm.llm_engine.add_request(name, prompt, params)
        return name

    def step(self) -> None:
        for output in self.llm.llm_engine.step():
            if (request := self.requests.get(output.request_id)) is None:
                continue
            request.tokens = list(output.outputs[0].token_ids)
            if output.num_cached_tokens is not None:
                request.cached = output.num_cached_tokens
            request.ended = output.finished

    def step_until(self, met: Callable[[], bool], what: str = "requests end") -> None:
        ends_s = time.monotonic() + DEADLINE_S
        while not met():
            assert time.monotonic() < ends_s, f"not within {DEADLINE_S:.0f} s: {what}; {self.requests}"
            self.step()

    def run(self, prompts: Sequence[Sequence[int]], tokens: int = 6, salt: str = "") -> list[Request]:
        """Runs the prompts together to their end."""
        names = [self.add(ids, tokens, salt) for ids in prompts]
        self.step_until(lambda: all(self.requests[name].ended for name in names))
        return [self.requests.pop(name) for name in names]

    def run_each(self, prompts: Sequence[Sequence[int]], tokens: int = 6, salt: str = "") -> list[Request]:
        """Runs one prompt after the other."""
        return [self.run([ids], tokens, salt)[0] for ids in prompts]

    def abort(self, name: str) -> None:
        self.llm.llm_engine.abort_request([name])
        self.requests.pop(name)

    def drain(self) -> None:
        """Steps until neither requests nor copies hold blocks."""
        engine = self.llm.llm_engine
        self.step_until(
            lambda: not (self.scheduler.has_requests() or engine.has_unfinished_requests()), "drain"
        )

    def forget(self) -> None:
        """Drops vLLM's own prefix cache and overwrites the KV memory: a later hit can only have been loaded."""
        self.drain()
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.reset_prefix_cache(), f"{pool.get_num_free_blocks()} blocks are free: some are held"
        for cache in self.kv_tensors():
            torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage()).fill_(SPOILT)

    def step_until_reset(self) -> None:
        """Drops vLLM's own prefix cache once no block is held, also if the core is in another process."""
        ends_s = time.monotonic() + DEADLINE_S
        while not self.llm.reset_prefix_cache():
            assert time.monotonic() < ends_s, f"not within {DEADLINE_S:.0f} s: no block is held"
            time.sleep(0.05)

    def kv_tensors(self) -> list[torch.Tensor]:
        layers = self.llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        found = [layer.kv_cache for layer in layers if getattr(layer, "kv_cache", None) is not None]
        assert found, "no layer has KV"
        return found

    def metrics(self) -> dict[str, float]:
        """Sums over labels, by name without `vllm:` and `_total`."""
        from prometheus_client import REGISTRY

        sums: dict[str, float] = {}
        for family in REGISTRY.collect():
            for sample in family.samples:
                if not sample.name.endswith(("_bucket", "_created")):
                    name = sample.name.removeprefix("vllm:").removesuffix("_total")
                    sums[name] = sums.get(name, 0.0) + sample.value
        return sums

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
