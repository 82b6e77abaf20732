"""How loads and stores run in this engine: the modes that were asked for, as far as it can have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexkv.config import FlexKVConfig
from flexkv.observe import get_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = get_logger(__name__)

SYNC_LOADS_NEED = (
    "with async scheduling the next step is under way before a failed load is heard of, and vLLM would keep the token "
    "which that step sampled; sync loads need --no-async-scheduling"
)

LAYERWISE_NEEDS = (
    "with speculative decoding vLLM asks how loads ended before the draft's layers have waited for theirs"
)

LAYERWISE_STORES_NEED_ONE_PASS = (
    "a draft's layers are written in several passes, and the first says that they are whole"
)

LAYERWISE_STORES_NEED_ONE_BATCH = (
    "with a batch in parts (enable_dbo, ubatch_size) the first part to leave a layer says that it is whole"
)

LAZY_STORES_NEED_HASHES = (
    "without vLLM's prefix caching a free block carries no hash, so nothing tells what it holds"
)


def possible_load_mode(asked: str, vllm_config: VllmConfig) -> str:
    """`load.mode` as this engine can have it; says so where that is another than `asked`."""
    if asked != "async" and vllm_config.scheduler_config.async_scheduling:
        logger.warning("load.mode=%s: %s; loads are async here", asked, SYNC_LOADS_NEED)
        return "async"
    if asked == "layerwise" and vllm_config.speculative_config is not None:
        logger.warning("load.mode=layerwise: %s; loads are sync here", LAYERWISE_NEEDS)
        return "sync"
    return asked


def possible_store_mode(asked: str, vllm_config: VllmConfig) -> str:
    """`store.mode` as this engine can have it; says so where that is another than `asked`."""
    if asked == "lazy" and not vllm_config.cache_config.enable_prefix_caching:
        logger.warning("store.mode=lazy: %s; stores are eager here", LAZY_STORES_NEED_HASHES)
        return "eager"
    if asked != "layerwise":
        return asked
    if vllm_config.speculative_config is not None:
        logger.warning("store.mode=layerwise: %s; stores are eager here", LAYERWISE_STORES_NEED_ONE_PASS)
        return "eager"
    if vllm_config.parallel_config.use_ubatching:
        logger.warning("store.mode=layerwise: %s; stores are eager here", LAYERWISE_STORES_NEED_ONE_BATCH)
        return "eager"
    return asked


def with_possible_modes(settings: FlexKVConfig, vllm_config: VllmConfig) -> FlexKVConfig:
    """The settings with both modes as this engine can have them."""
    load = possible_load_mode(settings.load.mode, vllm_config)
    store = possible_store_mode(settings.store.mode, vllm_config)
    return settings.model_copy(
        update={
            "load": settings.load.model_copy(update={"mode": load}),
            "store": settings.store.model_copy(update={"mode": store}),
        }
    )
