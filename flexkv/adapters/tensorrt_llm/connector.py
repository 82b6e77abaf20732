"""The two classes that TensorRT-LLM loads. They pass the engine's calls on to `WorkerSide` and `SchedulerSide`."""

from __future__ import annotations

import atexit
from typing import Any
from weakref import WeakMethod, WeakValueDictionary

from flexkv.adapters.common.refusals import log_refusal
from flexkv.adapters.common.start import log_start, read_settings
from flexkv.adapters.tensorrt_llm.api import SchedulerBase, WorkerBase, mpi_rank
from flexkv.adapters.tensorrt_llm.arguments import EngineArguments
from flexkv.adapters.tensorrt_llm.geometry import geometry_of_layout, geometry_of_pool, only_group
from flexkv.adapters.tensorrt_llm.messages import StepMetadata
from flexkv.adapters.tensorrt_llm.scheduler import SchedulerSide
from flexkv.adapters.tensorrt_llm.worker import WorkerSide
from flexkv.observe import get_logger

logger = get_logger(__name__)

_schedulers: WeakValueDictionary[str, SchedulerSide] = WeakValueDictionary()
"""The schedulers in this process, by address. Rank 0's worker polls its scheduler, because there are iterations in
which the engine does not call the scheduler."""


class FlexKVWorker(WorkerBase):
    """One rank's worker, the value of `connector_worker_class`.

    Raises:
        ConfigError: a setting is unknown or not allowed, or the engine is parallelised or configured in a way that
            flexkv does not support.
    """

    supports_attention_dp = False

    side_class: type[WorkerSide] = WorkerSide
    """The class of `side`. A subclass may set another class, for example to wrap the mover, which copies the pages."""

    @log_refusal(logger)
    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        settings = read_settings()
        self._arguments = EngineArguments.of(llm_args)
        self.side = self.side_class(settings, mpi_rank())
        _close_at_exit(self.shutdown)

    @log_refusal(logger)
    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        """Registers the engine's primary pool, shape [blocks, layers, 1 or 2, elements of a block].

        Raises:
            GeometryError, ConfigError: the pool has a different shape, or does not hold all of the model's KV.
        """
        self.side.register(geometry_of_pool(kv_cache_tensor, self._arguments))

    @log_refusal(logger)
    def register_kv_cache_layout(self, layout: Any) -> None:
        """Registers the engine's pools, described as in versions from 1.3 on.

        Raises:
            GeometryError: the cache has several layer groups, a sliding window, or regions that a page cannot
                represent.
            ConfigError: the cache does not hold all of the model's KV.
        """
        self.side.register(geometry_of_layout(layout, self._arguments))

    def register_forward_pass_callable(self) -> None:
        """Registers nothing, because copies are ordered relative to the engine's stream when they are submitted."""

    def start_load_kv(self, stream: Any) -> None:
        metadata = self.get_connector_meta()
        assert metadata is None or isinstance(metadata, StepMetadata)
        self.side.start(metadata)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        self.side.wait_for_layer(layer_idx, stream)

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Does nothing. Complete blocks are stored after a request has finished, because only then does the engine keep
        the request's blocks for a connector.
        """

    def wait_for_save(self, stream: Any) -> None:
        """Waits until the forward pass's loads have finished. Does not wait for store operations, because the engine
        keeps a request's blocks until `get_finished` returns the request.
        """
        self.side.forward_ended()

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        ended = self.side.finished(finished_gen_req_ids, started_loading_req_ids)
        if (scheduler := _schedulers.get(self.side.address)) is not None:
            scheduler.ranks.poll()
        return ended

    def shutdown(self) -> None:
        """Closes the lanes. Idempotent."""
        self.side.close()


class FlexKVScheduler(SchedulerBase):
    """The scheduler on rank 0, the value of `connector_scheduler_class`.

    Raises:
        ConfigError: see `FlexKVWorker`.
    """

    supports_attention_dp = False

    @log_refusal(logger)
    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        settings = read_settings()
        log_start(logger, settings, "tensorrt_llm")
        self.side = SchedulerSide(settings, EngineArguments.of(llm_args))
        _schedulers[self.side.ranks.address] = self.side
        _close_at_exit(self.shutdown)

    def wait_for_initialization(self) -> None:
        """Does not wait. The ranks join during the first iterations, and nothing is promised before all have joined."""

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        return self.side.build(scheduler_output)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return self.side.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        self.side.allocated(request, block_ids)

    def update_state_after_alloc_by_layer_group(
        self, request: Any, block_ids_by_layer_group: list[list[int]]
    ) -> None:
        self.side.allocated(request, only_group(block_ids_by_layer_group))

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        return self.side.finished(request, cache_block_ids)

    def request_finished_by_layer_group(
        self, request: Any, cache_block_ids_by_layer_group: list[list[int]]
    ) -> bool:
        return self.side.finished(request, only_group(cache_block_ids_by_layer_group))

    def cancel_load(self, request: Any, start: int = 0, end: int | None = None) -> None:
        """Called when the engine declines the promised prompt tokens [start, end): all promised tokens, or some at
        either end of their range."""
        self.side.cancel_load(_id_of(request), start, end)

    def request_reset(self, request: Any) -> None:
        self.side.forget(_id_of(request))

    def shutdown(self) -> None:
        """Closes the disks and the host pool. Idempotent."""
        _schedulers.pop(self.side.ranks.address, None)
        self.side.ranks.close()


def _id_of(request: Any) -> int:
    """The id of a request. The argument may also be an id, which is returned unchanged."""
    return int(getattr(request, "request_id", request))


def _close_at_exit(method: Any) -> None:
    """Calls the bound method `method` when the process exits, unless its object is gone by then. This is needed because
    some versions of TensorRT-LLM do not close connectors, and closing writes the pages that still have to go to
    disk."""
    reference = WeakMethod(method)

    def close() -> None:
        if (found := reference()) is not None:
            found()

    atexit.register(close)
