"""A stand-in for TensorRT-LLM's executor, because the test environment cannot install its package. The stand-in calls
the connector as the engine's connector manager and executor loop do, in their order and with their checks. The pool is
block-first, in plain memory.

The "model" writes the expected numbers into the pool. Before it computes a chunk, it compares all earlier positions of
the request with the expected numbers. Freed blocks are filled with garbage, so the comparison notices a copy out of a
freed block, or a block that was not loaded.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.unit.tensorrt_llm.group import LONG_S, Group
from tests.unit.tensorrt_llm.pool import GARBAGE, Pool, Shape, layout_of
from tests.unit.tensorrt_llm.request import Request


@dataclass(frozen=True)
class Version:
    """Differences between versions of the engine in their calls of the connector.

    Attributes:
        waits: whether the engine calls `wait_for_initialization`.
        quiet: whether the engine builds no metadata in an iteration that computes nothing.
        by_group: whether the engine passes the pool as a layout, and block numbers by layer group.
        request_data, scheduler_output: constructors of the arguments of `build_connector_meta`.
    """

    waits: bool = True
    quiet: bool = False
    by_group: bool = False
    request_data: Callable[..., Any] = SimpleNamespace
    scheduler_output: Callable[..., Any] = SimpleNamespace


FLAT = Version()
BY_GROUP = Version(by_group=True)


class Executor:
    """The executor of one rank. All ranks must get the same requests in the same order.

    Args:
        scheduler: the connector's scheduler; None on ranks other than 0.
        chunk: the largest number of tokens in a context chunk.
        version: the engine's version.
        hooks: whether the forward pass calls the hooks of its layers. The replay of a CUDA graph does not.

    Attributes:
        in_layer: called at each layer of the forward pass, when the layer may be read.
        kept: returns, for the number of tokens that are offered, how many of them the engine takes. It hands the rest
            back.
        calls: how often each hook was called.
        wrong: (request, position) of each wrong number that a forward pass has read.
        loaded: by request, the number of tokens that were loaded and not computed.
    """

    def __init__(
        self,
        group: Group,
        scheduler: Any,
        worker: Any,
        shape: Shape,
        chunk: int = 1_000_000,
        version: Version = FLAT,
        hooks: bool = True,
        seed: int = 1,
    ) -> None:
        self.group, self.scheduler, self.worker = group, scheduler, worker
        assert (scheduler is not None) == (group.rank == 0), "the scheduler lives on rank 0 alone"
        self.shape, self.chunk = shape, chunk
        self.version, self.hooks = version, hooks
        self.in_layer: Callable[[int], None] = lambda layer: None
        self.kept: Callable[[int], int] = lambda tokens: tokens
        self.pool = Pool(shape, group.rank)
        self.free = list(range(shape.blocks))
        random.Random(seed).shuffle(self.free)
        self.requests: list[Request] = []
        self.calls: Counter[str] = Counter()
        self.wrong: list[tuple[int, int]] = []
        self.loaded: dict[int, int] = {}
        self.ended: list[int] = []
        self.passes = 0
        self._new_loading: dict[int, Request] = {}
        self._new_saving: dict[int, Request] = {}
        self._pending_loading: dict[int, Request] = {}
        self._pending_saving: dict[int, Request] = {}
        self._local_loading: dict[int, Request] = {}
        self._local_saving: dict[int, Request] = {}
        self._has_sequence: set[int] = set()
        if version.by_group:
            worker.register_kv_cache_layout(layout_of(self.pool))
        else:
            worker.register_kv_caches(self.pool.tensor)
        if scheduler is not None and version.waits:
            scheduler.wait_for_initialization()

    # --- actions of a test ---

    def add(self, request: Request) -> Request:
        self.requests.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Ends the request in its present state, as if its client had disconnected."""
        if request.state != "done" and request.state != "saving":
            self._finish(request)

    def run(self, until: Any = None) -> None:
        """Iterates until every request is done, or until `until()` returns true."""
        ends_s = time.monotonic() + LONG_S
        while not (until() if until is not None else self.idle):
            assert time.monotonic() < ends_s, (
                f"stuck: {[(r.request_id, r.state) for r in self.requests if r.state != 'done']}"
            )
            if not self.step():
                time.sleep(0.001)

    @property
    def idle(self) -> bool:
        return all(request.state == "done" for request in self.requests)

    # --- one iteration ---

    def step(self) -> bool:
        """Runs one iteration of the loop. Returns whether a forward pass ran."""
        batch = [r for r in self.requests if r.state in ("context", "generation")]
        ran = False
        if batch:
            self._prepare(batch)
            output = self._scheduler_output(batch)
            for request_id, request in self._new_loading.items():
                request.state = "loading"
                assert request_id == request.request_id
            batch = [r for r in batch if r.state != "loading"]
            if batch or not self.version.quiet:
                self._bind(output)
                self.worker.start_load_kv(None)
                self.calls["start_load_kv"] += 1
            if batch:
                self._forward(batch)
                ran = True
        self._get_finished()
        return ran

    def _prepare(self, batch: list[Request]) -> None:
        for request in batch:
            if request.state != "context" or request.request_id in self._has_sequence:
                continue
            found: tuple[int, bool] = (0, False)
            if self.scheduler is not None:
                self.calls["get_num_new_matched_tokens"] += 1
                found = self.scheduler.get_num_new_matched_tokens(request, 0)
            tokens, is_async = self.group.broadcast(found)
            if tokens == 0 and is_async:
                raise RuntimeError("load_kv_async must be False when num_tokens is 0")
            assert tokens < request.prompt, "at least one prompt token must be left to compute"
            if (kept := self.kept(tokens)) < tokens:
                if self.scheduler is not None:
                    self.calls["cancel_load"] += 1
                    self.scheduler.cancel_load(request, kept, tokens)
                tokens, is_async = kept, is_async and kept > 0
            if is_async:
                self._new_loading[request.request_id] = request
            request.matched = tokens
            self._allocate(request, request.prompt)
            self._has_sequence.add(request.request_id)
            request.position = tokens
            self.loaded[request.request_id] = tokens
            if self.scheduler is not None:
                self.calls["update_state_after_alloc"] += 1
                if self.version.by_group:
                    self.scheduler.update_state_after_alloc_by_layer_group(request, [list(request.blocks)])
                else:
                    self.scheduler.update_state_after_alloc(request, list(request.blocks))

    def _allocate(self, request: Request, tokens: int) -> None:
        while len(request.blocks) * self.shape.tokens < tokens:
            request.blocks.append(self.free.pop())

    def _scheduler_output(self, batch: list[Request]) -> Any:
        new: list[Any] = []
        cached: list[Any] = []
        for request in batch:
            if request.request_id in self._new_loading:
                continue
            if request.state == "generation":
                self._allocate(request, len(request.tokens))
            is_context = request.state == "context"
            said = self.version.request_data(
                request_id=request.request_id,
                new_tokens=request.tokens[request.told_tokens :],
                new_block_ids=request.blocks[request.told_blocks :],
                computed_position=request.position if is_context else len(request.tokens) - 1,
                num_scheduled_tokens=min(request.prompt - request.position, self.chunk) if is_context else 1,
            )
            if is_context and not request.told:
                said.computed_position -= request.matched if self.loaded_in_step(request) else 0
            request.told_tokens, request.told_blocks = len(request.tokens), len(request.blocks)
            (cached if request.told else new).append(said)
            request.told = True
        return self.version.scheduler_output(new_requests=new, cached_requests=cached)

    def loaded_in_step(self, request: Request) -> bool:
        """Returns whether the request was matched by a lookup of this iteration. Only in this case does the request's
        first report not count the matched tokens.
        """
        return (
            request.matched > 0 and request.state == "context" and not getattr(request, "was_loading", False)
        )

    def _bind(self, output: Any) -> None:
        metadata = None
        if self.scheduler is not None:
            self.calls["build_connector_meta"] += 1
            metadata = self.scheduler.build_connector_meta(output)
        self.worker.bind_connector_meta(self.group.broadcast(metadata))

    def _forward(self, batch: list[Request]) -> None:
        self.passes += 1
        work: list[tuple[Request, int, int]] = []
        truths: list[NDArray[np.uint32]] = []
        for request in batch:
            if request.state == "context":
                first, end = request.position, min(request.prompt, request.position + self.chunk)
            else:
                first, end = len(request.tokens) - 1, len(request.tokens)
            truths.append(self.pool.truth(request, 0, first))
            work.append((request, first, end))
        for layer in range(self.shape.layers):
            if self.hooks:
                self.worker.wait_for_layer_load(layer, None)
            self.in_layer(layer)
            for (request, _, _), truth in zip(work, truths, strict=True):
                wrong = self.pool.wrong_in(request, truth, layer)
                self.wrong += [(request.request_id, position) for position in wrong]
            if self.hooks:
                self.worker.save_kv_layer(layer, None)
                self.calls["layer"] += 2
        for request, first, end in work:
            self.pool.write(request, first, end)
        self.worker.wait_for_save(None)
        self.calls["wait_for_save"] += 1
        for request, _, end in work:
            if request.state == "context":
                request.position = end
                if end < request.prompt:
                    continue
                request.state = "generation"
            request.tokens.append((sum(request.tokens) * 31 + request.secret) % 50_000)
            if len(request.tokens) - request.prompt >= request.new_tokens:
                self._finish(request)

    def _finish(self, request: Request) -> None:
        is_saving = False
        if self.scheduler is not None:
            self.calls["request_finished"] += 1
            if self.version.by_group:
                is_saving = self.scheduler.request_finished_by_layer_group(request, [list(request.blocks)])
            else:
                is_saving = self.scheduler.request_finished(request, list(request.blocks))
        if self.group.broadcast(is_saving):
            self._new_saving[request.request_id] = request
            request.state = "saving"
        else:
            assert not self.has_transfer(request.request_id), "blocks are freed under a transfer"
            self._release(request)

    def has_transfer(self, request_id: int) -> bool:
        return any(
            request_id in group for group in (self._new_loading, self._pending_loading, self._local_loading)
        )

    def _release(self, request: Request) -> None:
        for block in request.blocks:
            self.pool.words[block] = GARBAGE
        self.free = request.blocks[::-1] + self.free
        request.blocks = []
        request.state = "done"
        self.ended.append(request.request_id)

    def _get_finished(self) -> None:
        started, finished = list(self._new_loading), list(self._new_saving)
        self._pending_loading |= self._new_loading
        self._pending_saving |= self._new_saving
        self._new_loading, self._new_saving = {}, {}
        self.calls["get_finished"] += 1
        saved, loaded = self.worker.get_finished(finished, started)
        for request_id in saved:
            self._local_saving[request_id] = self._pending_saving.pop(
                request_id
            )  # raises KeyError for an id that is unknown or was returned before
        for request_id in loaded:
            self._local_loading[request_id] = self._pending_loading.pop(request_id)
        said = self.group.allgather((list(self._local_saving), list(self._local_loading)))
        for request_id in set.intersection(*(set(item[1]) for item in said)):
            request = self._local_loading.pop(request_id)
            if request.state == "loading":
                request.state = "context"
                request.was_loading = True  # type: ignore[attr-defined]
        for request_id in set.intersection(*(set(item[0]) for item in said)):
            request = self._local_saving.pop(request_id)
            assert not self.has_transfer(request_id), "blocks are freed under a load"
            self._release(request)
