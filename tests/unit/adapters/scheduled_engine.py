"""An engine made of vLLM's own scheduler and block pools, and of the scheduler's and the worker's side of flexkv's
connector. No model is run: a "forward pass" checks every number that it reads, and writes the expected numbers into
every KV group.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from flexkv.adapters.vllm.connector import FlexKVConnector
from flexkv.adapters.vllm.worker import WorkerSide
from tests.unit.adapters import vllm_objects  # noqa: F401 - sets the first hash of vLLM's chains
from tests.unit.adapters.model_runners import RUNNERS, nothing
from tests.unit.adapters.scheduled_pools import PAGE, pool_of

SPOILED = -1.0
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 128,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}


def do_now(work: Callable[[], None]) -> None:
    """Runs `work` at once. Engines use this if the KV memory is plain memory."""
    work()


class ScheduledEngine:
    """An engine with one rank.

    Args:
        match_unit: vLLM's `prefix_match_unit`.
        step_tokens: the largest number of tokens that a step computes.
        overlap: whether the engine schedules a step before it knows the result of the previous one.
        runner: the model runner in whose order the worker's hooks are called; a key of `RUNNERS`.
        give: enqueues work on the stream of the device that has the KV memory. The default runs the work at once.

    Attributes:
        specs: vLLM's specifications of the KV groups.
        pool_config: vLLM's configuration of the KV groups and their memory.
        worker, connector: the connectors of the worker and of the scheduler.
        scheduler, manager: vLLM's scheduler and its KV cache manager.
        memory: the memory of all blocks. At any time a block belongs to one group.
        hits: number of tokens in each request's last load, by request.
        trouble: messages about wrong values that a forward pass has read.
        sample: called in each step after the forward pass.
        fresh: blocks allocated since the last step.
    """

    def __init__(
        self,
        folder: Path,
        specs: Sequence[KVCacheSpec],
        blocks: int = 64,
        step_tokens: int = 64,
        match_unit: int | None = None,
        overlap: bool = False,
        worker_class: type[WorkerSide] = WorkerSide,
        role: str = "kv_both",
        runner: str = "V2",
        give: Callable[[Callable[[], None]], None] | None = None,
        **settings: Any,
    ) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(LLAMA))
        self.specs = list(specs)
        block = min(spec.block_size for spec in specs)
        config = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            block_size=block,
            max_num_batched_tokens=step_tokens,
            max_num_seqs=8,
            max_model_len=1024,
            enable_prefix_caching=True,
            async_scheduling=overlap,
            prefix_match_unit=match_unit,
            kv_transfer_config=KVTransferConfig(
                kv_connector="FlexKVConnector",
                kv_role=role,
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={
                    "identity.model": "numbers",
                    "host.bytes": "2MiB",
                    "host.extent_bytes": "2MiB",
                    "host.huge_pages": "off",
                }
                | settings,
            ),
        ).create_engine_config()
        # vLLM turns async scheduling off on a CPU, but this engine's schedule does not depend on the device.
        config.scheduler_config.async_scheduling = overlap
        self.pool_config = pool_of(specs, blocks)
        cache = config.cache_config
        cache.num_gpu_blocks, cache.block_size = blocks, block
        has_states = any(isinstance(spec, MambaSpec) for spec in specs)
        cache.mamba_cache_mode = "align" if has_states else "none"
        whole, hashed = resolve_kv_cache_block_sizes(self.pool_config, config)
        self.pool_config.hash_block_size = hashed
        self.pool_config.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(
            self.pool_config, config, whole, hashed
        )
        self._hasher = get_request_block_hasher(hashed, sha256)
        self.memory = torch.full((blocks, PAGE), SPOILED)
        caches = {
            f"layer.{n}": self.memory.view(
                blocks, 1, 1 if isinstance(spec, MambaSpec) else spec.block_size, -1
            )
            for n, spec in enumerate(specs)
        }
        kind = type("ScheduledConnector", (FlexKVConnector,), {"worker_class": worker_class})
        self.worker = kind(config, KVConnectorRole.WORKER, self.pool_config)
        self._runner = RUNNERS[runner](config, self.worker, caches)
        kind_of_scheduler = AsyncScheduler if overlap else Scheduler
        self.scheduler = kind_of_scheduler(
            config, self.pool_config, StructuredOutputManager(config), whole, hashed, log_stats=True
        )
        connector = self.scheduler.connector
        assert isinstance(connector, FlexKVConnector)
        self.connector = connector
        self.manager = self.scheduler.kv_cache_manager
        self.connector.set_xfer_handshake_metadata({0: self.worker.get_handshake_metadata()})
        self.hits: dict[str, int] = {}
        self.trouble: list[str] = []
        self.fresh: list[int] = []
        self._overlap = overlap
        self._give = give or do_now
        self.sample: Callable[[], None] = nothing
        self._in_flight: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []
        self._watch_hits()
        self._watch_new_blocks()

    def _watch_hits(self) -> None:
        allocated = self.connector.update_state_after_alloc

        def note(request: Request, blocks: Any, num_external_tokens: int) -> None:
            if num_external_tokens:
                self.hits[request.request_id] = num_external_tokens
            allocated(request, blocks, num_external_tokens)

        self.connector.update_state_after_alloc = note  # type: ignore[method-assign]

    def _watch_new_blocks(self) -> None:
        get_new_blocks = self.manager.block_pool.get_new_blocks

        def note(count: int, *args: Any, **options: Any) -> Any:
            blocks = get_new_blocks(count, *args, **options)
            self.fresh += [block.block_id for block in blocks]
            return blocks

        self.manager.block_pool.get_new_blocks = note  # type: ignore[method-assign]

    # --- requests ---

    def add(self, name: str, tokens: Sequence[int], output: int = 4, **extra: Any) -> Request:
        params = SamplingParams(max_tokens=output, ignore_eos=True, extra_args=extra or None)
        request = Request(name, list(tokens), params, None, block_hasher=self._hasher)
        self.scheduler.add_request(request)
        return request

    def end(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def run(self, name: str, tokens: Sequence[int], output: int = 4, **extra: Any) -> int:
        """Runs a request until it and its stores have ended. Returns the number of tokens that were loaded."""
        self.hits.pop(name, None)
        self.add(name, tokens, output, **extra)
        self.settle()
        return self.hits.get(name, 0)

    def forget(self) -> None:
        """Drops the engine's own prefix cache and overwrites all KV."""
        assert self.scheduler.reset_prefix_cache()
        self.spoil()

    def spoil(self) -> None:
        """Overwrites all KV."""
        self._give(partial(self.memory.fill_, SPOILED))

    @property
    def steps_in_flight(self) -> int:
        """Number of steps whose result the scheduler does not know yet."""
        return len(self._in_flight)

    @property
    def waiting_hold_blocks(self) -> bool:
        """Whether a request that is not running holds blocks, either for a load in flight (even if the request was
        aborted) or for loaded KV. If so, vLLM refuses a reset that would preempt running requests.
        """
        return any(
            any(table)
            for name, request in self.scheduler.requests.items()
            if request.status != RequestStatus.RUNNING
            for table in self.manager.get_block_ids(name)
        )

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.requests) or self.connector.has_pending_push_work()

    def settle(self, steps: int = 3000) -> None:
        for _ in range(steps):
            if not self.busy:
                return
            self.step()
        raise AssertionError(f"still busy: {list(self.scheduler.requests)}")

    # --- a step ---

    def step(self, between: Callable[[], None] = lambda: None) -> None:
        """Runs a step.

        Args:
            between: called after the step's forward pass, before the scheduler knows the step's result.
        """
        output = self.scheduler.schedule()
        self._in_flight.append((output, self._run(output)))
        between()
        while len(self._in_flight) > int(self._overlap and output.total_num_scheduled_tokens > 0):
            self.scheduler.update_from_output(*self._in_flight.pop(0))

    def _run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        copies = output.kv_cache_block_copies or ()
        early = bool(copies or output.new_block_ids_to_zero or self.scheduler.has_mamba_layers)
        names = list(output.num_scheduled_tokens)

        # Blocks that a load fills are not overwritten, because this could destroy KV that the load has already copied.
        orders: Any = output.kv_connector_metadata
        graphs = [job.graph for job in orders.loads]
        loaded = {block for graph in graphs for op in graph.ops for block in op.blocks.tolist()}
        fresh = [block for block in self.fresh if block not in loaded]
        self.fresh.clear()

        def prepare() -> None:
            if early:
                self._give(partial(self._spoil, [*fresh, *(output.new_block_ids_to_zero or ())]))
            for copy in copies:
                self._give(partial(self._copy, copy.dst_block_id, copy.src_block_id))

        def forward() -> None:
            if not early:
                self._give(partial(self._spoil, fresh))
            for number in range(len(self.specs)):
                self.worker.wait_for_layer_load(f"layer.{number}")
                for name in names:
                    request = self.scheduler.requests[name]
                    self._forward(request, output.num_scheduled_tokens[name], number)
                self.worker.save_kv_layer(f"layer.{number}", self.memory, None)

        report = self._runner.step(output, prepare, forward, self.sample)
        sampled = []
        for name in names:
            request = self.scheduler.requests[name]
            end = request.num_computed_tokens
            sampled.append([self._tokens(request, end + 1)[end]] if end >= request.num_tokens else [])
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=report,
        )

    def _spoil(self, blocks: list[int]) -> None:
        self.memory[blocks] = SPOILED

    def _copy(self, to: int, source: int) -> None:
        self.memory[to] = self.memory[source]

    @staticmethod
    def _tokens(request: Request, count: int) -> list[int]:
        """Returns the request's first `count` tokens, including tokens that the scheduler does not know yet."""
        tokens = list(request.all_token_ids[:count])
        while len(tokens) < count:
            tokens.append(3 + zlib.crc32(str(tokens).encode()) % 5)
        return tokens

    # --- numbers ---

    def _forward(self, request: Request, tokens: int, group: int) -> None:
        """Writes the KV of one group for the last `tokens` tokens that the scheduler already counts as computed."""
        end = request.num_computed_tokens
        start = end - tokens
        spec = self.specs[group]
        table = list(self.manager.get_block_ids(request.request_id)[group])
        if isinstance(spec, MambaSpec):
            self._write_state(request, group, table, start, end)
            return
        name, block = request.request_id, spec.block_size
        for position in range(start, end):
            if not table[position // block]:
                self.trouble.append(f"{name}: group {group} has no block for {position}")
        seen = range(self._sees_from(spec, start), start)
        values = {at: self._value(request, group, at + 1) for at in (*seen, *range(start, end))}

        def work() -> None:
            for position in seen:
                self._check(name, group, table, position, values[position])
            for position in range(start, end):
                page = self.memory[table[position // block]].view(block, -1)
                page[position % block] = values[position]

        self._give(work)

    @staticmethod
    def _sees_from(spec: KVCacheSpec, position: int) -> int:
        """Returns the first position that the token at `position` attends to."""
        if isinstance(spec, SlidingWindowSpec):
            return max(0, position - spec.sliding_window + 1)
        if isinstance(spec, ChunkedLocalAttentionSpec):
            return position // spec.attention_chunk_size * spec.attention_chunk_size
        return 0

    def _value(self, request: Request, group: int, tokens: int) -> float:
        """Returns the number that a group's KV must have for the token at position `tokens - 1`. The number depends on
        all tokens up to this one.
        """
        return float(zlib.crc32(f"{group}/{self._tokens(request, tokens)}".encode()) % 1_000_003)

    def _check(self, name: str, group: int, table: Sequence[int], position: int, value: float) -> None:
        block = self.specs[group].block_size
        row = self.memory[table[position // block]].view(block, -1)[position % block]
        if not bool((row == value).all()):
            self.trouble.append(
                f"{name}: group {group} has {row[0]} at {position} of block {table[position // block]}"
            )

    def _write_state(self, request: Request, group: int, table: Sequence[int], start: int, end: int) -> None:
        block, name = self.specs[group].block_size, request.request_id
        before = self._value(request, group, start) if start else 0.0
        after = self._value(request, group, end)

        def work() -> None:
            if start and not bool((self.memory[table[(start - 1) // block]] == before).all()):
                self.trouble.append(f"{name}: group {group} has no state at {start}")
            self.memory[table[(end - 1) // block]] = after

        self._give(work)

    def check(self) -> None:
        assert not self.trouble, self.trouble[:5]
        self.connector.scheduler.unit.manager.check_integrity()

    def close(self) -> None:
        self.connector.shutdown()
        self.worker.shutdown()
