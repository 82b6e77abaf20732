"""A minimal engine that runs the connector's scheduler side and worker sides. It uses vLLM's requests and block pool,
and calls the connector in vLLM's order. Its "forward pass" writes expected numbers into its pools, so that a test can
check every value exactly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from flexkv.adapters.vllm import local_engines
from flexkv.adapters.vllm.engine_spec import EngineRole, EngineSpec
from flexkv.adapters.vllm.input_names import InputNames
from flexkv.adapters.vllm.metadata import ConnectorMetadata, WorkerMetadata
from flexkv.adapters.vllm.pool_geometry import pool_geometry
from flexkv.adapters.vllm.scheduler import SchedulerSide
from flexkv.adapters.vllm.worker import WorkerSide
from flexkv.cache.keys import EngineKeyChain, namespace_digest
from flexkv.config import load_config
from flexkv.facts.keys import Keys
from flexkv.facts.ranks import UnitOwner
from flexkv.observe import Counters, merge_values
from flexkv.unit.capacity import PromptLimit
from flexkv.unit.live_unit import LiveUnit
from tests.unit.adapters.mini_pools import HEADS, Live, MiniPools, kv_config
from tests.unit.adapters.vllm_objects import BLOCK_TOKENS, make_pool, make_request

UNTIL_S = 60.0
NAMESPACE = namespace_digest({"model": "mini"})


class MiniEngine:
    """An engine with `ranks` workers. With `remote`, the scheduler side and the workers do not find each other in this
    process, as if they ran in different processes.

    Args:
        head_replicas: number of adjacent ranks that have the same KV head.
        early_handshake: if False, handshakes reach the scheduler side only in the report of the first step, as under
            vLLM's MultiConnector.
        names: the names of images and other inputs that are valid; names that are digests are valid even if they are
            not listed.

    Attributes:
        failed_by_another: blocks that a connector other than flexkv's failed to load. The next report lists them.
        takes_back: whether the model runner also reduces its count of a running request's computed tokens when the
            scheduler does. V1 does; V2 does not.
        events: KV cache events of the steps so far; see `take_events`.
        after_layer: in steps that store layer by layer, the forward pass calls it with the number of each layer that it
            has written.
    """

    def __init__(
        self,
        blocks: int = 32,
        ranks: int = 1,
        remote: bool = False,
        worker_class: type[WorkerSide] = WorkerSide,
        with_events: bool = False,
        role: EngineRole = EngineRole(),  # noqa: B008 - frozen
        latent: bool = False,
        head_replicas: int = 1,
        early_handshake: bool = True,
        prompt_limit: PromptLimit | None = None,
        names: InputNames | None = None,
        **settings: Any,
    ) -> None:
        config = load_config(
            {"host.bytes": "2MiB", "host.extent_bytes": "2MiB", "host.huge_pages": "off"} | settings, {}
        )
        self.kv_config = kv_config(blocks, latent=latent, heads=1 if head_replicas > 1 else HEADS)
        self.pool: BlockPool = make_pool(blocks)
        self.pools = MiniPools(self.kv_config, ranks, ranks if latent else head_replicas)
        self.workers = [worker_class(config, rank, ranks, head_replicas) for rank in range(ranks)]
        for worker, caches in zip(self.workers, self.pools.caches, strict=True):
            worker.register_kv_caches(caches, self.kv_config)
            if not remote:
                local_engines.announce(worker)
        spec = EngineSpec(
            config,
            pool_geometry(self.kv_config),
            UnitOwner("", NAMESPACE, "unit0"),
            ranks,
            step_tokens=16,
            role=role,
            prompt_limit=prompt_limit,
            names=names or InputNames(),
            with_events=with_events,
        )
        self.side = SchedulerSide(spec)
        self.side.bind_block_pool(self.pool)
        if early_handshake:
            self.take_handshakes()
        self.live: dict[str, Live] = {}
        self.finished_loads: list[str] = []
        self.invalid: set[int] = set()
        self.failed_by_another: set[int] = set()
        self.takes_back = True
        self.after_layer: Callable[[int], None] = lambda layer: None
        self.counters = Counters()
        self.events: list[Any] = []
        self._pending: dict[str, int] = {}
        self._held: list[Any] = []

    def take_handshakes(self) -> None:
        """Passes the handshakes of the workers to the scheduler side. A worker may make no handshake."""
        handshakes = {worker.rank: worker.handshake() for worker in self.workers}
        self.side.take_handshake({rank: item for rank, item in handshakes.items() if item is not None})

    def take_events(self) -> list[Any]:
        """Returns the KV cache events since the last call of this function."""
        self._take_events()
        events, self.events = self.events, []
        return events

    def _take_events(self) -> None:
        if self.side.events is not None:
            self.events += self.side.events.take_events()

    # --- actions of the scheduler ---

    def add(self, request: Request) -> int:
        """Admits a request: looks it up, and allocates blocks for all of its tokens. Returns the number of external
        tokens that it gets.
        """
        live = self.live[request.request_id] = Live(request)
        tokens, is_async = self._ask(request)
        count = -(-request.num_tokens // BLOCK_TOKENS)
        live.blocks = self.pool.get_new_blocks(count)
        ids = [block.block_id for block in live.blocks]
        self.side.allocated(request, SimpleNamespace(get_block_ids=lambda: (ids,)), tokens)
        request.num_computed_tokens = tokens
        live.waiting_for_load = is_async
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS if is_async else RequestStatus.RUNNING
        if not is_async:
            self._cache_blocks(live, request.num_tokens)
        return tokens

    def _ask(self, request: Request, steps: int = 20_000) -> tuple[int, bool]:
        """Repeats the lookup, with an empty step after each attempt, until the connector has an answer."""
        for _ in range(steps):
            tokens, is_async = self.side.match(request, 0)
            if tokens is not None:
                return tokens, is_async
            self.step({})
        raise AssertionError(f"{request.request_id} waits for its lookup for ever")

    def adopt(self, request: Request, shared: list[KVCacheBlock]) -> None:
        """Admits a request whose first blocks, `shared`, are in the engine's own prefix cache."""
        live = self.live[request.request_id] = Live(request)
        tokens = len(shared) * BLOCK_TOKENS
        self.side.match(request, tokens)
        self.pool.touch(shared)
        count = -(-request.num_tokens // BLOCK_TOKENS) - len(shared)
        live.blocks = [*shared, *self.pool.get_new_blocks(count)]
        ids = [block.block_id for block in live.blocks]
        self.side.allocated(request, SimpleNamespace(get_block_ids=lambda: (ids,)), 0)
        request.num_computed_tokens = tokens
        request.status = RequestStatus.RUNNING

    def step(
        self, scheduled: dict[str, int] | None = None, before_forward: Callable[[], None] | None = None
    ) -> None:
        """Runs one engine step. `scheduled` maps each request to the number of tokens to compute. By default the step
        computes all prompt tokens that are not computed yet.
        """
        if scheduled is None:
            scheduled = {
                name: live.request.num_tokens - live.request.num_computed_tokens
                for name, live in self.live.items()
                if not live.waiting_for_load and live.request.num_tokens > live.request.num_computed_tokens
            }
        output = self._output(scheduled)
        orders = self.side.build(output)
        for name, tokens in scheduled.items():
            request = self.live[name].request
            request.num_computed_tokens += tokens
            request.num_in_flight_tokens += tokens
        reports = [self._run_worker(worker, orders, scheduled, before_forward) for worker in self.workers]
        for name, tokens in scheduled.items():
            self.live[name].request.num_in_flight_tokens -= tokens
        self._take(reports)

    def hold_reports(self) -> Callable[[], None]:
        """Withholds the reports of steps from the scheduler. Returns a function that delivers all withheld reports and
        ends the withholding.
        """
        take, held = self._take, self._held

        def tell() -> None:
            self._take = take  # type: ignore[method-assign]
            for reports in held:
                take(reports)
            held.clear()

        self._take = held.append  # type: ignore[method-assign, assignment]
        return tell

    @property
    def unit(self) -> LiveUnit:
        """The connector's unit. It exists only after the handshakes of all ranks."""
        unit = self.side.unit
        assert isinstance(unit, LiveUnit), f"no unit is built: {unit.state}"
        return unit

    @property
    def stored_pages(self) -> int:
        """Number of pages that flexkv has published."""
        return int(self.unit.manager.stats().stored_pages)

    def until(self, done: Callable[[], bool]) -> None:
        """Runs empty steps until the condition holds."""
        ends_s = time.monotonic() + UNTIL_S
        while not done():
            assert time.monotonic() < ends_s, "it never came to that"
            self.step({})

    def end_load(self, name: str) -> None:
        """If the request waits for a load, runs empty steps until the load has ended."""
        live = self.live[name]
        self.until(lambda: not live.waiting_for_load)

    def preempt(self, name: str) -> None:
        """Takes a running request's blocks away. The next step reports the request as preempted."""
        self._lose_blocks(name)
        self._step_naming_preempted(name)

    def preempt_and_resume(self, name: str) -> int:
        """Preempts a running request as a reset of the engine does: the request is looked up again and gets other
        blocks before a step reports that it was preempted. Returns the number of external tokens that the request gets.
        """
        request = self._lose_blocks(name).request
        tokens = self.add(request)
        self._step_naming_preempted(name)
        return tokens

    def _lose_blocks(self, name: str) -> Live:
        live = self.live.pop(name)
        live.request.num_computed_tokens = 0
        live.request.num_preemptions += 1
        self.pool.free_blocks(reversed(live.blocks))
        return live

    def _step_naming_preempted(self, name: str) -> None:
        output_of = self._output

        def output_with_preemption(scheduled: dict[str, int]) -> SchedulerOutput:
            output = output_of(scheduled)
            output.preempted_req_ids = {name}
            return output

        self._output = output_with_preemption  # type: ignore[method-assign]
        self.step({})
        self._output = output_of  # type: ignore[method-assign]

    def drain(self) -> None:
        self.until(lambda: not self.side.has_work)

    def finish(self, name: str, keep_blocks: bool = False) -> list[KVCacheBlock]:
        """Ends the request, and frees its blocks unless `keep_blocks` is set or a load is still writing them. Returns
        the blocks.
        """
        live = self.live.pop(name)
        self.side.finished(live.request)
        if not live.waiting_for_load and not keep_blocks:
            self.pool.free_blocks(reversed(live.blocks))
        return live.blocks

    def run(self, request: Request) -> int:
        """Runs a request from its lookup to its end, and waits until its stores have ended. Returns the number of
        external tokens that it got.
        """
        tokens = self.add(request)
        self.end_load(request.request_id)
        self.step()
        self.check(request.request_id)
        self.finish(request.request_id)
        self.drain()
        return tokens

    def forget(self) -> None:
        """Drops the engine's prefix cache, and overwrites all blocks."""
        assert self.pool.reset_prefix_cache()
        self.pools.spoil()

    @staticmethod
    def keys_of(request: Request) -> Keys:
        chain = EngineKeyChain(NAMESPACE, 0)
        chain.extend(request.block_hashes)
        return chain.keys

    def wrong(self, name: str, end: int | None = None) -> list[int]:
        """Returns the positions whose KV is wrong in some layer on some rank, among all computed positions or those
        before `end`.
        """
        live = self.live[name]
        return self.pools.wrong(live, live.request.num_computed_tokens if end is None else end)

    def check(self, name: str) -> None:
        assert self.wrong(name) == []

    # --- internals ---

    def _cache_blocks(self, live: Live, tokens: int) -> None:
        full = tokens // BLOCK_TOKENS
        self.pool.cache_full_blocks(
            live.request, live.blocks, 0, full, block_size=BLOCK_TOKENS, kv_cache_group_id=0
        )

    def _output(self, scheduled: dict[str, int]) -> SchedulerOutput:
        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = dict(scheduled)
        output.total_num_scheduled_tokens = sum(scheduled.values())
        cached = CachedRequestData.make_empty()
        for name in scheduled:
            live = self.live[name]
            ids = ([block.block_id for block in live.blocks],)
            if not live.scheduled:
                live.scheduled = True
                output.scheduled_new_reqs.append(SimpleNamespace(req_id=name, block_ids=ids))
            else:
                cached.req_ids.append(name)
                cached.new_block_ids.append(None)
        output.scheduled_cached_reqs = cached
        return output

    def _run_worker(
        self,
        worker: WorkerSide,
        orders: ConnectorMetadata,
        scheduled: dict[str, int],
        before_forward: Callable[[], None] | None,
    ) -> tuple[set[str], set[int], WorkerMetadata | None]:
        # As in vLLM's two model runners, a load begins after the forward pass if this pass does not read the loaded
        # blocks.
        sync = any(job.sync for job in orders.loads)
        worker.before_forward(orders)
        if sync:
            worker.start_loads(orders)
        if before_forward is not None:
            before_forward()
        for layer in self.kv_config.kv_cache_groups[0].layer_names if scheduled else ():
            worker.wait_for_layer(layer)
        self._forward(worker, scheduled, any(graph.is_layerwise for graph in orders.stores))
        worker.after_forward(orders)
        if not sync:
            worker.start_loads(orders)
        worker.submit_stores(orders)
        worker.poll(orders.idle, orders.disk_busy)
        return worker.reports.take_finished(), worker.reports.take_failed_blocks(), worker.take_metadata()

    def _forward(self, worker: WorkerSide, scheduled: dict[str, int], by_layer: bool) -> None:
        """Writes the KV that the step computes. With `by_layer`, it writes one layer after another and calls the
        worker's hook after each.
        """
        parts = self._computed_parts(scheduled)
        if not by_layer:
            self.pools.write(worker.rank, parts)
            return
        for number, layer in enumerate(self.pools.write_by_layer(worker.rank, parts)):
            worker.layer_written(layer)
            self.after_layer(number)

    def _computed_parts(self, scheduled: dict[str, int]) -> list[tuple[Live, int, int]]:
        """Returns each request of the step with two positions: the first position that the step computes, and the
        position after the last one that it computes.
        """
        parts = []
        for name, tokens in scheduled.items():
            live = self.live[name]
            end = live.request.num_computed_tokens + live.ahead
            # A real model runner may write past the end of a request's blocks. This engine leaves those values out,
            # because flexkv does not depend on them.
            parts.append((live, end - tokens, min(end, len(live.blocks) * BLOCK_TOKENS)))
        return parts

    def _take(self, reports: list[tuple[set[str], set[int], WorkerMetadata | None]]) -> None:
        metadata: WorkerMetadata | None = None
        for finished, _, report in reports:
            for name in finished:
                self._pending[name] = self._pending.get(name, 0) + 1
                assert self._pending[name] <= len(self.workers), f"{name} reported twice by a rank"
            if report is not None:
                metadata = report if metadata is None else metadata.aggregate(report)
        invalid = self.failed_by_another.union(*(failed for _, failed, _ in reports))
        self.failed_by_another = set()
        self.invalid |= invalid
        for live in self.live.values():
            for number, block in enumerate(live.blocks):
                if block.block_id in invalid:
                    computed = live.request.num_computed_tokens
                    live.request.num_computed_tokens = min(computed, number * BLOCK_TOKENS)
                    if not self.takes_back and not live.waiting_for_load:
                        live.ahead += computed - live.request.num_computed_tokens
                    break
        done = {name for name, count in self._pending.items() if count == len(self.workers)}
        self.side.update(
            KVConnectorOutput(
                finished_recving=done, invalid_block_ids=invalid, kv_connector_worker_meta=metadata
            )
        )
        self._take_events()
        if (counters := self.side.take_counters()) is not None:
            merge_values(self.counters.data, counters)
        for name in done:
            del self._pending[name]
            self.finished_loads.append(name)
            if (waiting := self.live.get(name)) is not None:
                waiting.waiting_for_load = False
                waiting.request.status = RequestStatus.RUNNING
                computed = min(waiting.request.num_computed_tokens, waiting.request.num_tokens - 1)
                waiting.request.num_computed_tokens = computed
                self._cache_blocks(waiting, computed)

    def close(self) -> None:
        self.side.close()
        for worker in self.workers:
            worker.close()


def stored_engine(
    make_engine: Callable[..., MiniEngine], tokens: Sequence[int], **options: Any
) -> MiniEngine:
    """Returns an engine that has stored the full blocks of these tokens in flexkv's cache and has dropped its own
    prefix cache.
    """
    engine = make_engine(**options)
    engine.run(make_request(list(tokens), "one"))
    engine.forget()
    return engine
