"""One rank's cache: its unit, lanes and keys, driven by one thread. It does not use SGLang's classes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from flexkv.adapters.common.announcements import Announcements
from flexkv.adapters.common.event_book import BOOK_NAME
from flexkv.adapters.common.load_job import LoadJob
from flexkv.adapters.common.metric_report import MetricReport
from flexkv.adapters.common.prompt_keys import GROUP, TokenKeys
from flexkv.adapters.common.rank_pool import RankPool
from flexkv.adapters.common.rank_worker import RankWorker
from flexkv.adapters.common.waiting_lookup import Pause, match_and_wait
from flexkv.adapters.sglang.pages import page_keys
from flexkv.cache.base import HUB, Completion, StorePlan
from flexkv.cache.keys import chain_seed, named_mark, namespace_digest
from flexkv.config import FlexKVConfig
from flexkv.facts.keys import Keys
from flexkv.facts.ranks import KvGroup, UnitOwner
from flexkv.facts.request_settings import NO_SETTINGS, RequestSettings
from flexkv.observe import PageLoss, get_logger
from flexkv.transfer.graph import BlockIds, OpId, OpResult, TransferGraph
from flexkv.unit.base import CacheRole
from flexkv.unit.build import build_unit
from flexkv.unit.capacity import PromptLimit

logger = get_logger(__name__)

QUIESCE_LOOK_S = 0.001

Watcher = Callable[[Completion], None]


class RankCache(RankWorker):
    """One rank's cache: its unit, its cache manager and its transfers. All calls must come from one thread at a time;
    completions are handled inside `take_results`.

    Args:
        pool: the pool that pages are loaded into and stored from.
        owner: the owner of the pages, whose namespace the keys use.
        stream_of: `current_stream` of `RankWorker`.
        mover: copies the pages of host lanes; None to use the transfer engine's own mover.
        fails_requests: see `CacheRole`.
        prompt_limit: see `build_unit`.
        rank: the rank's number in the engine, which flexkv's plugins get.

    Attributes:
        manager: the unit's cache manager.
    """

    def __init__(
        self,
        config: FlexKVConfig,
        pool: RankPool,
        owner: UnitOwner,
        *,
        stream_of: Callable[[int], int],
        mover: Any = None,
        fails_requests: bool = True,
        prompt_limit: PromptLimit | None = None,
        rank: int = 0,
    ) -> None:
        super().__init__(config, 0, stream_of)
        self.plugin_rank = rank
        self.config = config
        self.page_tokens = pool.block_tokens
        self._mover = mover
        self._namespace = owner.namespace
        self._watchers: dict[OpId, Watcher] = {}
        self._announcements: Announcements | None = None
        self._tree_is_old = self._stored_old = False
        self.take_group(pool)
        facts = self.facts()
        assert facts is not None
        self._unit = build_unit(
            config,
            [KvGroup(pool.block_tokens)],
            {0: facts},
            owner,
            CacheRole(fails_requests=fails_requests),
            prompt_limit=prompt_limit,
            prompt_keys=lambda tokens, salt: [
                TokenKeys(pool.block_tokens, self._namespace, chain_seed(None, salt or None)).of(tokens)
            ],
        )
        self.manager = self._unit.manager
        with ExitStack() as taken:
            taken.callback(self._unit.close)
            self.attach(self._unit.unit_id, self._unit.pool, self._unit.places[0], self._unit.slabs)
            taken.callback(super().close)
            if self._ops.gds_refusal:
                self._unit.stop_straight_loads(0, self._ops.gds_refusal)
            self._unit.grow()
            self._report = MetricReport(
                self.counters,
                self._unit.count,
                logger,
                "sglang:",
                {"unit": owner.unit},
                config.observe.metrics_log_s,
            )
            taken.pop_all()

    def make_mover(self) -> Any:
        return self._mover

    # --- lookups ---

    def keys(self, hashes: Sequence[str], named: str = "") -> Keys:
        """Index keys made from SGLang's page hashes.

        Args:
            hashes: SGLang's hashes of the pages.
            named: the request's `RequestSettings.namespace`, which is also part of the extra key in the hashes; empty
                if it has none.
        """
        return page_keys(self._namespace + named_mark(named), hashes)

    def match(
        self,
        request_id: str,
        keys: Keys,
        wait_s: float,
        pause: Pause | None = None,
        settings: RequestSettings = NO_SETTINGS,
    ) -> int:
        """Leases for `request_id` the leading pages that can be loaded, and returns their number. These are pages in
        host memory and, if `loads_from_disk`, pages on disk.

        Pages on disk that cannot be loaded directly are first read into host memory. This method waits for these reads,
        for up to `wait_s` seconds, because SGLang cannot be asked to repeat the lookup later. Between two polls it
        calls `pause`, which may let other threads use this cache. If `pause` raises, the lookup ends.
        """
        ends_s = time.monotonic() + wait_s
        self.poll()
        try:
            match = match_and_wait(
                lambda: self.manager.match(request_id, [keys], 0, None, settings),
                self.manager.waits,
                ends_s,
                self.poll,
                pause,
            )
        except BaseException:
            self.manager.end_request(request_id)
            raise
        if not match.blocks:
            # Nothing is leased. The request is released here, because SGLang will not report its end to this cache.
            self.manager.release(request_id)
        return match.blocks

    def prefetch(self, request_id: str, keys: Keys, settings: RequestSettings = NO_SETTINGS) -> None:
        """Starts reading the request's pages from disk to host memory, before `match` needs them.

        If no `match` follows, the pages are protected from eviction for at most twice `disk.wait_s`.
        """
        self.poll()
        if self.manager.prefetch(request_id, [keys], 0, settings):
            self.poll()

    # --- transfers ---

    def load(
        self, request_id: str, graph: TransferGraph, watcher: Watcher, stream: int | None = None
    ) -> LoadJob:
        """Starts a load that the manager planned. If the lane's queue is full, later polls start it.

        Args:
            watcher: called once for each of the ops, when it has finished.
            stream: the copies start after the work that is enqueued on this stream so far; None for the engine's
                stream.
        """
        job = LoadJob(request_id, graph, sync=True)
        self._watchers.update((op.op_id, watcher) for op in graph.ops)
        self._ops.submit_load(job, self._ops.point(stream))
        return job

    def store(
        self,
        request_id: str,
        keys: Keys,
        blocks: BlockIds,
        watcher: Watcher,
        stream: int | None,
        ttl_s: int | None = None,
    ) -> StorePlan:
        """Starts to store the pages that are not stored yet, as far as there are free slots. Returns the plan. If the
        plan has a graph, the graph has been submitted.

        Args:
            watcher: called once for each op of the plan's graph, when the op has finished.
            stream: see `load`.
            ttl_s: see `CacheManager.begin_store`.
        """
        self._stored_old |= self._tree_is_old
        plan = self.manager.begin_store(request_id, GROUP, keys, blocks, 0, ttl_s=ttl_s)
        PageLoss.NO_SLOT.count(self.counters, plan.dropped)
        if plan.graph is not None:
            self._watchers.update((op.op_id, watcher) for op in plan.graph.ops)
            self._ops.submit_store(plan.graph, after=self._ops.point(stream))
        return plan

    def wait_layer(self, job: LoadJob, layer: int, ends_s: float, stream: int | None) -> bool:
        return self._ops.wait_layer(job, layer, ends_s, stream)

    def finish_load(self, *jobs: LoadJob) -> None:
        """Waits until no copy of the loads is in flight. When this returns, the watchers have been called for every op.
        Pages that take longer than `load.deadline_s` count as failed.

        Raises:
            ClosedError: a copy neither finished nor could be cancelled, so its pages may be written at any time.
        """
        self._ops.finish_load(*jobs)
        self.take_results()

    def finish_store(self, graph: TransferGraph) -> None:
        """Waits until no copy of a store operation is in flight, as `finish_load` does for loads.

        Raises:
            ClosedError: a copy neither finished nor could be cancelled, so its pages may be read at any time.
        """
        self._ops.finish_store(graph)
        self.take_results()

    def take_results(self) -> None:
        """Takes the results of finished ops, passes them to the manager, and calls the ops' watchers."""
        if not self._watchers:
            return
        self._ops.poll()
        for result in self._ops.reports.take_results():
            self._end(result)
        # The failed blocks are dropped: SGLang asks per batch whether pages have arrived, not per block or request.
        self._ops.reports.take_failed_blocks()

    def poll(self) -> None:
        """Takes results, advances the work of the disks and the growth of the host pool, ends expired leases, and
        reports metrics. Costs a few microseconds; never waits."""
        self.take_results()
        self._unit.poll()
        self._unit.grow()
        self._unit.expire_if_due(self.counters)
        self._report.report_if_due()

    @property
    def loads_from_disk(self) -> bool:
        """Whether loads may read pages from disk directly, so that pages on disk may be promised; see
        `disk.gds_may_fail_requests`."""
        return self._unit.slabs is not None

    @property
    def disk_busy(self) -> bool:
        """Whether the disks have unfinished work, which advances only when `poll` is called."""
        return self._unit.busy

    def _end(self, result: OpResult) -> None:
        watcher = self._watchers.pop(result.op_id)
        done = self.manager.complete(0, result)
        if done is None:
            return
        if done.loss is not None:
            done.loss.count(self.counters, len(done.failed_blocks))
        watcher(done)

    # --- announcements to routers ---

    def announce(self, identity: bytes) -> Announcements:
        """Starts recording where pages are, for events. Must be called once, before the first page is stored.

        Args:
            identity: identifies the meaning of packed records; see `EventBook`.
        """
        disk = self._unit.own_disks
        self._announcements = Announcements(self.manager.tiers[HUB], disk)
        if disk is not None and disk.volumes.folder is not None:
            self._announcements.open_book(disk.volumes.folder / BOOK_NAME, identity)
        self.manager.hub.listeners.append(self._announcements)
        return self._announcements

    # --- life ---

    def quiesce(self, deadline_s: float) -> bool:
        """Waits for all copies; returns whether they finished within `deadline_s` seconds."""
        ends_s = time.monotonic() + deadline_s
        self.take_results()
        while self._watchers:
            if time.monotonic() > ends_s:
                return False
            time.sleep(QUIESCE_LOOK_S)
            self.take_results()
        return True

    def new_weights(self) -> None:
        """Forgets everything stored so far, and changes the namespace, so that no other run finds pages that are stored
        from now on.

        The former namespace identifies the weights with which the engine was started. Nothing identifies the engine's
        current weights.
        """
        self._tree_is_old, self._stored_old = True, False
        self.manager.reset()
        self._namespace = namespace_digest({"before": self._namespace, "run": os.urandom(16)})
        self.counters.add("flexkv_resets_total")

    def tree_emptied(self) -> None:
        """Must be called when the engine has emptied its radix tree, and no copy that stores KV from the tree is in
        flight.

        Between new weights and this call, the engine may store KV that the former weights computed, or that depends on
        such KV. All that was stored in between is forgotten.
        """
        if self._stored_old:
            self.new_weights()
        self._tree_is_old = False

    def close(self) -> None:
        """Closes the lanes, writes the pages that still have to go to disk, and frees the memory. Waits up to
        `transfer.close_s` for copies, and up to the same time again for the lanes."""
        self.quiesce(self.config.transfer.close_s)
        self.close_lanes()
        self.take_results()
        self._report.close()
        self._unit.close()
        if self._announcements is not None:
            # The unit is closed first, because closing it still writes pages to disk, which the announcements must
            # record.
            self._announcements.close()
        super().close()
