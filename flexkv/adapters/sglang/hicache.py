"""flexkv as HiCache's storage: SGLang keeps its host tier, and pages beyond it go to flexkv's host memory and disks.

Start SGLang with `--hicache-storage-backend dynamic`, this class and `"interface_v1": 1`. flexkv's lanes copy pages
between SGLang's host pool and flexkv's slots, each byte once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig, HiCacheStorageExtraInfo

from flexkv.adapters.common.refusals import log_refusal
from flexkv.adapters.common.start import log_start, read_settings
from flexkv.adapters.sglang.engine_watch import EngineListener, watch
from flexkv.adapters.sglang.identity import Place, owner_of, prompt_limit
from flexkv.adapters.sglang.page_batches import PageBatches
from flexkv.adapters.sglang.pages import pages_of
from flexkv.adapters.sglang.pools import view_of_host_pool
from flexkv.adapters.sglang.rank_cache import RankCache
from flexkv.errors import ContractError, GeometryError
from flexkv.observe import get_logger
from flexkv.unit.build import share_of_node

logger = get_logger(__name__)

OWN_SETTINGS = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})
"""Entries of the extra config that are for SGLang; all others are settings of flexkv."""


class FlexKVHiCache(HiCacheStorage, EngineListener):
    """One rank's storage. SGLang calls it from its prefetch and backup threads at once.

    Raises:
        ConfigError: a setting is wrong, or nothing identifies the weights.
    """

    @log_refusal(logger)
    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None) -> None:
        extra = dict(storage_config.extra_config or {})
        if not extra.get("interface_v1"):
            raise ContractError('flexkv needs "interface_v1": 1 in --hicache-storage-backend-extra-config')
        self._place = Place.of_this_process()
        settings = {key: value for key, value in extra.items() if key not in OWN_SETTINGS}
        self._config = share_of_node(read_settings(settings), self._place.units_on_node)
        log_start(logger, self._config, "sglang")
        self._batches: PageBatches | None = None

    # --- set up ---

    @log_refusal(logger)
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Takes SGLang's host pool. Registering the same pool again changes nothing.

        Raises:
            GeometryError: the pool's layout is not one that can be moved piece by piece.
            ContractError: another pool is registered already, so this one's pages would be read and written in the
                other's memory.
            ConfigError: this SGLang does not say when weights change, and HiCache keeps its storage over a flush.
        """
        if self._batches is not None:
            registered = self.mem_pool_host
            if mem_pool_host is registered:
                return
            raise ContractError(
                f"a second host pool, {type(mem_pool_host).__name__} of {mem_pool_host.size} tokens, beside "
                f"{type(registered).__name__} of {registered.size}: a storage has one; make another storage"
            )
        # Checked before memory and folders are taken, because a storage that is refused must hold neither.
        watch(self, "new_weights")
        super().register_mem_pool_host(mem_pool_host)
        pool = view_of_host_pool(mem_pool_host)
        from sglang.srt.runtime_context import get_server_args

        server_args = get_server_args()
        owner = owner_of(server_args, pool, self._place, self._config, str(mem_pool_host.dtype))
        cache = RankCache(
            self._config,
            pool,
            owner,
            stream_of=_no_stream,
            fails_requests=False,  # a load reports each page separately
            prompt_limit=prompt_limit(server_args),
            rank=self._place.rank,
        )
        try:
            self._batches = PageBatches(cache, self._config.disk.wait_s)
        except BaseException:
            cache.close()
            raise

    @log_refusal(logger)
    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Refuses any pool other than that of keys and values, which comes by `register_mem_pool_host`.

        Raises:
            GeometryError: the pool holds something other than keys and values, which would not be stored.
        """
        if host_pool is not getattr(self, "mem_pool_host", None) and str(host_pool_name) != "kv":
            raise GeometryError(
                f"the model has a host pool {host_pool_name!s} beside K and V, which flexkv does not store"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    @property
    def _ready(self) -> PageBatches:
        if self._batches is None:
            raise ContractError("SGLang has not registered its host pool")
        return self._batches

    # --- what SGLang asks ---

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Number of leading pages that can be loaded; pages on disk are promoted for that."""
        return self._ready.exists(keys)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """See `PageBatches.load`. SGLang uses or frees the pages of its host pool once the call has returned."""
        batches = self._ready
        blocks = pages_of(host_indices, batches.cache.page_tokens)
        loaded: list[bool] = batches.load(keys, blocks).tolist()
        return loaded

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """See `PageBatches.store`."""
        batches = self._ready
        blocks = pages_of(host_indices, batches.cache.page_tokens)
        stored: list[bool] = batches.store(keys, blocks).tolist()
        return stored

    def clear(self) -> None:
        """Makes everything stored a miss."""
        self._ready.clear()

    def close(self) -> None:
        """Writes the pages that wait for the disk, and frees the memory."""
        if self._batches is not None:
            self._batches.close()

    def new_weights(self) -> None:
        """Called when the weights are about to change: permanently makes everything stored so far a miss."""
        if self._batches is not None:
            self._batches.new_weights()

    # --- the older interface, which SGLang does not use with "interface_v1" ---

    def get(self, *_arguments: Any, **_named: Any) -> Any:
        raise NotImplementedError('pages move by batch_get_v1 and batch_set_v1: set "interface_v1": 1')

    batch_get = set = batch_set = get


def _no_stream(device: int) -> int:
    raise GeometryError(f"SGLang's host pool lies on cuda:{device}: expected plain memory")
