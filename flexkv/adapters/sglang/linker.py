"""flexkv as SGLang's external linker: copies pages directly between the device pool and the host tier."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from flexkv.adapters.common.refusals import log_refusal
from flexkv.adapters.common.settings_reader import SettingsReader
from flexkv.adapters.common.start import log_start, read_settings
from flexkv.adapters.sglang.engine_watch import EngineListener, watch
from flexkv.adapters.sglang.identity import Place, owner_of, prompt_limit
from flexkv.adapters.sglang.load_batches import NO_BATCH, LoadBatches, QueuedLoad
from flexkv.adapters.sglang.offloads import Offloads
from flexkv.adapters.sglang.page_events import PageEvents, words_identity
from flexkv.adapters.sglang.pages import pages_of
from flexkv.adapters.sglang.pools import view_of
from flexkv.adapters.sglang.rank_cache import RankCache
from flexkv.adapters.sglang.request_settings import RequestBook
from flexkv.adapters.torch_tensors.device import torch_stream
from flexkv.errors import ClosedError, GeometryError
from flexkv.observe import get_logger
from flexkv.transfer.stream import stream_address
from flexkv.unit.build import share_of_node

logger = get_logger(__name__)


class FlexKVLinker(UnifiedCacheLinker, EngineListener):
    """One rank's linker. SGLang's scheduler thread calls all methods.

    SGLang needs the same results from all ranks. Therefore `load` never refuses, `offload` refuses only pages that a
    request's settings exclude, and offloads complete in the order in which they began. If a rank has no free slots,
    only the result of the completed offload shows this. SGLang reduces the results over its ranks.

    Args:
        server_args: SGLang's arguments.
        params: the parameters of the engine's tree.
        components: the components of the engine's tree; flexkv accepts only full attention.
        extra_config: settings of flexkv, with dotted keys or nested (`linker_extra_config`).
        forward_stream: the stream on which the engine's forward passes write the pool; None on a CPU.

    Raises:
        GeometryError: the engine has a pool, draft pool or tree component that flexkv does not store.
        ConfigError: a setting is wrong, nothing identifies the weights, or this version of SGLang lacks a function that
            flexkv hooks.
    """

    @log_refusal(logger)
    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Collection[ComponentType],
        extra_config: Mapping[str, object] | None = None,
        forward_stream: Any = None,
    ) -> None:
        _check(params, components)
        kv_pool = params.token_to_kv_pool_allocator.get_kvcache()
        pool = view_of(kv_pool, params.page_size)
        place = Place.of_this_process()
        config = share_of_node(read_settings(extra_config), place.units_on_node)
        log_start(logger, config, "sglang")
        self.forward_stream = forward_stream
        self.pools = {PoolName.KV: kv_pool}
        owner = owner_of(server_args, pool, place, config, str(kv_pool.dtype))
        self._cache = RankCache(
            config,
            pool,
            owner,
            stream_of=torch_stream,
            mover=self.make_mover(),
            prompt_limit=prompt_limit(server_args),
            rank=place.rank,
        )
        self._loads = LoadBatches(self._cache)
        self.layer_done_counter = self._loads
        self._offloads = Offloads(self._cache)
        self._requests = RequestBook(SettingsReader(self._cache.counters, logger))
        self._queued: dict[str, QueuedLoad] = {}
        self._prefetching = False
        self._events: PageEvents | None = None
        try:
            watch(self, "new_weights", "end_copies")
            watch(self._requests, "enter", "begin_insert")
            # SGLang reduces lookups over its ranks, so either all ranks must prefetch or none. Therefore the decision
            # depends only on the settings.
            if config.disk.folders and config.disk.prefetch_requests:
                watch(self, "prefetch")
            if params.enable_kv_cache_events:
                self._announce_pages(params, place)
        except BaseException:
            self._cache.close()
            raise

    def _announce_pages(self, params: Any, place: Place) -> None:
        """Adds the events of flexkv's pages to those that the engine publishes, if no other rank holds a part of the
        same pages."""
        if not place.is_alone:
            logger.warning(
                "KV events name the pages of SGLang's cache alone: each rank keeps its part of a page and evicts it "
                "by itself, and SGLang publishes from the first rank"
            )
            return
        self._events = PageEvents(params, self._cache.announce(words_identity(params)))
        watch(self._events, "begin_walk", "add_to")

    def make_mover(self) -> Any:
        """The mover, which copies the pages of host lanes; None for the transfer engine's own. Subclasses override this
        method to wrap the mover."""
        return None

    # --- lookups ---

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Returns the lengths in pages of all prefixes that can be restored: 1 to the number of leading pages found,
        because each page has its own index entry. During `prefetch`, only starts reads from disk and returns no length.
        """
        hashes = _only(transfers).keys
        settings = self._requests.of(rid)
        keys = self._cache.keys(hashes, settings.namespace)
        if self._prefetching:
            self._cache.prefetch(rid, keys, settings)
            return []
        self._cache.counters.add("flexkv_lookup_tokens_total", len(hashes) * self._cache.page_tokens)
        pages = self._cache.match(rid, keys, self._cache.config.load.lookup_wait_s, settings=settings)
        return list(range(1, pages + 1))

    def prefetch(self, tree_cache: Any, request: Any) -> None:
        """Called when a request enters the engine's queue. Starts reading the request's pages from disk, but promises
        none of them.

        Runs the engine's own lookup, which computes the hashes of the pages that the engine's radix tree lacks and
        passes them to `lookup`.
        """
        self._prefetching = True
        try:
            request.init_next_round_input(tree_cache, cow_mamba=False)
        finally:
            self._prefetching = False

    # --- loads ---

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Queues a load of promised pages; never refuses. If the pages are gone, the load fails later, and then SGLang
        treats it as failed on all ranks."""
        transfer = _only(transfers)
        blocks = pages_of(transfer.device_indices, self._cache.page_tokens)
        settings = self._requests.of(rid)
        keys = self._cache.keys(transfer.keys, settings.namespace)
        self._queued[rid] = QueuedLoad(keys, blocks, settings)
        return True

    def start_layer_wise_loading(self) -> int:
        if not self._queued:
            return NO_BATCH
        queued, self._queued = self._queued, {}
        return self._loads.start(queued, self._writer_stream())

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self._loads.finish(counter_index)

    def cancel_queued_load(self, rid: str) -> bool:
        if self._queued.pop(rid, None) is None:
            return False
        self._cache.manager.release(rid)
        return True

    # --- offloads ---

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Starts to store the pages of a node of the engine's radix tree. Refuses them if the settings of the request
        that is being inserted exclude storing. If there are no free slots, the offload is accepted but completes as not
        stored.
        """
        settings = self._requests.inserting
        if settings.skip_save:
            return False
        transfer = _only(transfers)
        blocks = pages_of(transfer.device_indices, self._cache.page_tokens)
        keys = self._cache.keys(transfer.keys, settings.namespace)
        if self._events is not None:
            self._events.begin_store(keys, transfer.keys, session_id)
        self._offloads.add(keys, blocks, self._writer_stream(), settings.ttl_s)
        return True

    def num_completed_offloads(self) -> int:
        """Number of completed offloads. Also polls the cache, because the scheduler calls this in every step, even when
        it is idle."""
        self._cache.poll()
        self._loads.log_left_out()
        return self._offloads.completed()

    def pop_completed_offload(self) -> bool:
        if self._events is not None:
            self._events.end_store()
        return self._offloads.pop()

    # --- life ---

    def new_weights(self) -> None:
        """Called when the weights are about to change. Nothing stored so far is ever found again."""
        logger.info("new weights: everything stored is forgotten")
        self._cache.new_weights()

    def reset(self) -> None:
        """Called when the engine empties its radix tree. Waits for all copies, so that none is in flight when this
        returns. Stored pages stay valid, except those that may hold KV of former weights."""
        self._settle()
        self._cache.tree_emptied()

    def end_copies(self) -> None:
        """Waits for all copies, because the pool's memory is about to be released.

        Raises:
            ClosedError: a copy did not finish.
        """
        self._wait_for_copies("a copy has not ended: the memory that it reads or writes must not be released")
        # The registrations with cuFile must end too, because they pin the memory. The next copy between disk and pool
        # registers the pool again.
        self._cache.end_registrations()

    def close(self) -> None:
        self._settle()
        self._cache.close()

    def _settle(self) -> None:
        """Cancels queued loads, waits for all copies, and ends all batches and offloads.

        Raises:
            ClosedError: a copy did not finish.
        """
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        self._loads.reset()
        self._wait_for_copies("a store has not ended: the pages that it reads must not be written")
        self._offloads.reset()
        if self._events is not None:
            self._events.end_stores()

    def _wait_for_copies(self, failure: str) -> None:
        """Waits for all copies, for at most twice `transfer.stuck_s`.

        Raises:
            ClosedError: a copy did not finish in that time; `failure` is the error's text.
        """
        if not self._cache.quiesce(2 * self._cache.config.transfer.stuck_s):
            raise ClosedError(failure)

    # --- streams ---

    def _writer_stream(self) -> int | None:
        """The stream on which the engine writes the pool's pages; load and store operations start after the work that
        is enqueued on this stream. None on a CPU."""
        if self._cache.device is None or self.forward_stream is None:
            return self._cache.current_stream()
        return stream_address(self.forward_stream)


def _check(params: Any, components: Collection[ComponentType]) -> None:
    if odd := sorted(component.name for component in components if component is not ComponentType.FULL):
        raise GeometryError(
            f"the model has {', '.join(odd)} beside full attention; flexkv stores full attention alone"
        )
    if params.mtp_draft_device_pools or params.sidecar_draft_device_pools:
        raise GeometryError("the draft model has KV pools of its own, which flexkv does not store")
    if params.attn_cp_size != 1:
        raise GeometryError(f"attention context parallelism of {params.attn_cp_size}; flexkv works with 1")


def _only(transfers: list[PoolTransfer]) -> PoolTransfer:
    """The only transfer in the list: flexkv offers SGLang only one pool, that of K and V."""
    [transfer] = transfers
    assert transfer.name == PoolName.KV, f"a transfer of pool {transfer.name}, which was never offered"
    return transfer
