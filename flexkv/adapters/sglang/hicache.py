"""flexkv as HiCache's storage: SGLang keeps its own host tier. flexkv's host memory and disks are the storage behind
that tier.

To use it, start SGLang with `--hicache-storage-backend dynamic`, and name this class and `"interface_v1": 1` in the
extra config. flexkv's lanes copy pages directly between SGLang's host pool and flexkv's slots, so each byte is copied
once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig, HiCacheStorageExtraInfo

from flexkv.adapters.common.refusals import log_refusal
from flexkv.adapters.common.start import log_start, read_settings
from flexkv.adapters.sglang.engine_watch import EngineListener, watch, weights_changed
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
"""Entries of the extra config that are for SGLang; all other entries are settings of flexkv."""


class FlexKVHiCache(HiCacheStorage, EngineListener):
    """One rank's storage. SGLang may call it from its prefetch and backup threads at the same time.

    Raises:
        ContractError: the extra config lacks `"interface_v1": 1`.
        GeometryError: the engine has attention context parallelism.
        ConfigError: a setting is unknown or not allowed.
    """

    @log_refusal(logger)
    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None) -> None:
        extra = dict(storage_config.extra_config or {})
        if not extra.get("interface_v1"):
            raise ContractError('flexkv needs "interface_v1": 1 in --hicache-storage-backend-extra-config')
        if storage_config.attn_cp_size != 1:
            raise GeometryError(
                f"attention context parallelism of {storage_config.attn_cp_size}; flexkv works with 1"
            )
        # SGLang lets only the first of several ranks store latents, because it assumes that the ranks share one
        # storage. With flexkv, each rank has its own storage, and a page counts as found only if every rank has it.
        storage_config.is_mla_model = False
        self._place = Place.of_this_process()
        settings = {key: value for key, value in extra.items() if key not in OWN_SETTINGS}
        self._config = share_of_node(read_settings(settings), self._place.units_on_node)
        log_start(logger, self._config, "sglang")
        self._batches: PageBatches | None = None

    # --- set up ---

    @log_refusal(logger)
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Registers SGLang's host pool. Registering the same pool again changes nothing.

        Raises:
            GeometryError: flexkv does not support the pool's layout.
            ContractError: a different pool is registered already. The second pool's pages would be read from and
                written to the first pool's memory.
            ConfigError: nothing identifies the weights, or this version of SGLang has no hook for changes of weights.
                The hook is needed because HiCache keeps its storage across a flush.
        """
        if self._batches is not None:
            registered = self.mem_pool_host
            if mem_pool_host is registered:
                return
            raise ContractError(
                f"a second host pool, {type(mem_pool_host).__name__} of {mem_pool_host.size} tokens, beside "
                f"{type(registered).__name__} of {registered.size}: a storage has one; make another storage"
            )
        # The hook is installed before anything is allocated. If SGLang lacks the function to hook, this method raises,
        # and a refused storage must not hold memory or folders.
        watch(self, "new_weights", "emptied")
        super().register_mem_pool_host(mem_pool_host)
        pool = view_of_host_pool(mem_pool_host)
        from sglang.srt.runtime_context import get_server_args

        server_args = get_server_args()
        owner = owner_of(server_args, pool, self._place, self._config, _kv_dtype(mem_pool_host, server_args))
        cache = RankCache(
            self._config,
            pool,
            owner,
            stream_of=_no_stream,
            fails_requests=False,  # a failed load fails no request, because `batch_get_v1` reports each page separately
            prompt_limit=prompt_limit(server_args),
            rank=self._place.rank,
        )
        try:
            self._batches = PageBatches(cache, self._config.disk.wait_s)
        except BaseException:
            cache.close()
            raise
        if weights_changed():
            # SGLang attaches this storage to a running engine whose weights have changed, so the namespace does not
            # identify them.
            self._batches.new_weights()

    @log_refusal(logger)
    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Accepts only the pool of keys and values, which `register_mem_pool_host` registers.

        Raises:
            GeometryError: the pool holds anything other than keys and values; flexkv would not store that.
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

    # --- called by SGLang ---

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Number of leading pages that can be loaded. Pages on disk are read into host memory first."""
        return self._ready.exists(keys)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """See `PageBatches.load`. SGLang uses or frees the pages of its host pool as soon as this returns."""
        batches = self._ready
        blocks = pages_of(host_indices, batches.cache.page_tokens)
        loaded: list[bool] = batches.load(keys, blocks).tolist()
        return loaded

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        batches = self._ready
        blocks = pages_of(host_indices, batches.cache.page_tokens)
        stored: list[bool] = batches.store(keys, blocks).tolist()
        return stored

    def clear(self) -> None:
        """Forgets everything that was stored."""
        self._ready.clear()

    def close(self) -> None:
        """Writes the pages that still have to go to disk, and frees the memory."""
        if self._batches is not None:
            self._batches.close()

    def new_weights(self) -> None:
        """Called when the weights are about to change. Nothing stored so far is ever found again."""
        if self._batches is not None:
            self._batches.new_weights()

    def emptied(self) -> None:
        """Called when the engine has emptied its radix tree and its host tier."""
        if self._batches is not None:
            self._batches.tree_emptied()

    # --- the older interface, which SGLang does not use with "interface_v1" ---

    def get(self, *_arguments: Any, **_named: Any) -> Any:
        raise NotImplementedError('pages move by batch_get_v1 and batch_set_v1: set "interface_v1": 1')

    batch_get = set = batch_set = get


def _kv_dtype(mem_pool_host: Any, server_args: Any) -> str:
    """Name of the dtype of the values in the pages. A host pool holds every kind of fp8 as bytes, so the name includes
    SGLang's argument `kv_cache_dtype`. If the argument is `auto`, the files that describe the model's quantisation
    determine the dtype, and these files are in the namespace."""
    if mem_pool_host.dtype != torch.uint8:
        return str(mem_pool_host.dtype)
    return f"{mem_pool_host.dtype}, {server_args.kv_cache_dtype}"


def _no_stream(device: int) -> int:
    raise GeometryError(f"SGLang's host pool lies on cuda:{device}: expected plain memory")
