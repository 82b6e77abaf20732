"""Runs a vLLM 0.33 engine in this process, step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

BLOCK_TOKENS = 16
POOL_BLOCKS = 256
DEADLINE_S = 120.0
SPOILT = 0x3F
"""The byte that overwrites KV. Two such bytes are 0.75 in bfloat16: a wrong number, but vLLM can compute with it."""

ANSWER_TOKENS = 4
"""Number of tokens in an answer. Each token takes a step, and even the first one depends on the KV of the complete
prompt.
"""

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
    "worker_extension_cls": "tests.engines_vllm33.engine.WorkerExtension",
    "seed": 0,
}


@dataclass
class Request:
    tokens: list[int] = field(default_factory=list)
    cached: int | None = None
    ended: bool = False


class WorkerExtension:
    """Methods that tests call in the worker's process. vLLM adds them to its worker class."""

    vllm_config: Any

    def has_overwritten_kv(self) -> bool:
        """Overwrites the KV memory. Its name begins with `has_`, so flexkv assumes that it does not change the
        weights."""
        for cache in self._kv_tensors():
            overwrite(cache)
        return True

    def let_sleeps_overwrite_kv(self) -> None:
        from vllm.device_allocator.cumem import CuMemAllocator

        CuMemAllocator.get_instance().kv_caches = self._kv_tensors()

    def _kv_tensors(self) -> list[torch.Tensor]:
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        found = [layer.kv_cache for layer in layers if getattr(layer, "kv_cache", None) is not None]
        assert found, "no layer has KV"
        return found


def overwrite(cache: torch.Tensor) -> None:
    torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage()).fill_(SPOILT)


class Engine:
    """An engine. Its core is in this process, unless VLLM_ENABLE_V1_MULTIPROCESSING is 1.

    Args:
        transfer: vLLM's `kv_transfer_config`; None for no connector.
        arguments: arguments of `vllm.LLM`, which override `ARGUMENTS`.
    """

    def __init__(self, model: str, transfer: Mapping[str, Any] | None = None, **arguments: Any) -> None:
        from vllm import LLM

        if transfer is not None:
            arguments["kv_transfer_config"] = dict(transfer)
        self.llm = LLM(model=model, **{**ARGUMENTS, **arguments})
        self.requests: dict[str, Request] = {}
        self._added = 0
        self._phases: dict[str, dict[str, Any]] = {}

    @property
    def is_apart(self) -> bool:
        """Whether the engine's core is in another process."""
        return not hasattr(self.llm.llm_engine.engine_core, "engine_core")

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    # --- requests ---

    def add(
        self,
        ids: Sequence[int],
        tokens: int,
        fields: Mapping[str, Any] | None = None,
        salt: str | None = None,
    ) -> str:
        """Adds a request.

        Args:
            tokens: number of tokens to generate.
            fields: `kv_transfer_params` of the request; None for none.
            salt: `cache_salt` of the request; None for none.
        """
        from vllm import SamplingParams

        self._added += 1
        name = f"r{self._added}"
        params = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": dict(fields)} if fields else None,
        )
        self.requests[name] = Request()
        prompt: dict[str, Any] = {"prompt_token_ids": list(ids)}
        if salt is not None:
            prompt["cache_salt"] = salt
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

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int = ANSWER_TOKENS,
        fields: Mapping[str, Any] | None = None,
        salt: str | None = None,
    ) -> list[Request]:
        """Runs the prompts together to their end. `tokens`, `fields` and `salt` are those of `add`."""
        names = [self.add(ids, tokens, fields, salt) for ids in prompts]
        self.step_until(lambda: all(self.requests[name].ended for name in names))
        return [self.requests.pop(name) for name in names]

    def run_each(self, prompts: Sequence[Sequence[int]], tokens: int = ANSWER_TOKENS) -> list[Request]:
        """Runs the prompts one after the other."""
        return [self.run([ids], tokens)[0] for ids in prompts]

    def state(self, name: str) -> str:
        """Returns the scheduler's state of a request, or an empty string if the scheduler does not have the request."""
        # The core's id of a request is `name` plus a suffix.
        states = [one.status.name for key, one in self.scheduler.requests.items() if key.startswith(name)]
        return states[0] if states else ""

    def abort(self, name: str) -> None:
        self.llm.llm_engine.abort_request([name])
        self.requests.pop(name)

    # --- the engine's cache ---

    def drain(self) -> None:
        """Steps the engine until no request and no copy uses a block."""
        if self.is_apart:
            # A core in another process answers this call only after it has no work left.
            self.llm.sleep(level=0, mode="wait")
            self.llm.wake_up(["scheduling"])
            return
        engine = self.llm.llm_engine
        self.step_until(
            lambda: not (self.scheduler.has_requests() or engine.has_unfinished_requests()), "drain"
        )

    def forget(self) -> None:
        """Drops vLLM's own prefix cache, and overwrites the KV memory. Later hits can then come only from flexkv's
        loads."""
        self.drain()
        assert self.llm.reset_prefix_cache(), "some blocks are held"
        self.llm.collective_rpc("has_overwritten_kv")

    # --- the results of a case ---

    def note(self, phase: str, answers: Sequence[Request]) -> None:
        """Records the answers of a phase in a form that JSON can encode. `end` returns these records."""
        self._phases[phase] = {
            "tokens": [answer.tokens for answer in answers],
            "cached": [answer.cached for answer in answers],
        }

    def end(self, **more: Any) -> dict[str, Any]:
        """Ends the engine. Returns facts about it, its answers by phase, its metrics, and the values in `more`."""
        self.drain()
        found = {**self._facts(), "phases": self._phases, "metrics": self._metrics(), **more}
        self.llm.llm_engine.engine_core.shutdown()
        return found

    def _facts(self) -> dict[str, Any]:
        config = self.llm.llm_engine.vllm_config
        groups = [] if self.is_apart else self.scheduler.kv_cache_config.kv_cache_groups
        return {
            "is_apart": self.is_apart,
            "v2": bool(config.use_v2_model_runner),
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "device": str(config.device_config.device_type),
            "layout": str(config.cache_config.kv_cache_layout),
            "groups": [type(group.kv_cache_spec).__name__ for group in groups],
        }

    def _metrics(self) -> dict[str, float]:
        """Returns the metrics, summed over their labels, by name without `vllm:` and `_total`."""
        from prometheus_client import REGISTRY

        sums: dict[str, float] = {}
        for family in REGISTRY.collect():
            for sample in family.samples:
                if not sample.name.endswith(("_bucket", "_created")):
                    name = sample.name.removeprefix("vllm:").removesuffix("_total")
                    sums[name] = sums.get(name, 0.0) + sample.value
        return sums
