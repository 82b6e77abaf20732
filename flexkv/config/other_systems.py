"""Names of settings in systems with which flexkv is often compared, and flexkv's equivalent settings.

Each name's meaning comes from that system's own configuration: LMCache, the FlexKV of taco-project, SGLang's HiCache,
vLLM's offloading connectors. The list leaves out a name that has a different meaning in the other system than in
flexkv, because a wrong hint is worse than none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import get_args

from flexkv.config.sections import IndexConfig

LMCACHE = "LMCache"
TACO = "taco-project's FlexKV"
HICACHE = "SGLang's HiCache"
VLLM = "vLLM's offloading"

ENGINE_BLOCK = (
    "flexkv's unit is the engine's own block (--block-size of vLLM, --page-size of SGLang, tokens_per_block of "
    "TensorRT-LLM)"
)
NO_PEERS = "flexkv moves nothing between engines; a store that they share does (docs/remote.md)"
A_STORE = "mooncake://HOST:PORT or redis://HOST:PORT of a store (docs/remote.md)"
NO_SERVER = "flexkv has no server: it lives in the engine's processes"
EXACT_EVICTION = "flexkv evicts the blocks that it needs room for, when it needs it"
OWN_LAYOUT = "flexkv's host pool and disks have one layout, a block in one piece"
POLICIES = " or ".join(repr(policy) for policy in get_args(IndexConfig.model_fields["policy"].annotation))
ENGINE_METRICS = "metrics are in the engine's own (docs/metrics.md)"


@dataclass(frozen=True, slots=True)
class OtherName:
    """flexkv's equivalent of a setting of another system.

    Attributes:
        systems: the systems that use this name.
        setting: flexkv's equivalent setting; empty if there is none.
        how: how to give the value to flexkv, or why flexkv has no such setting.
        unit: the unit of the other system's value; empty if the value is not a size.
    """

    systems: str
    setting: str = ""
    how: str = ""
    unit: str = ""


def _all(names: str, row: OtherName) -> dict[str, OtherName]:
    return dict.fromkeys(names.split(), row)


OTHER_NAMES: Mapping[str, OtherName] = {
    # LMCache
    "chunk_size": OtherName(LMCACHE, how=ENGINE_BLOCK),
    "local_cpu": OtherName(LMCACHE, "host.bytes", "host memory is always in use; this is its size"),
    "max_local_cpu_size": OtherName(LMCACHE, "host.bytes_per_rank", "of one rank, as there", "GiB"),
    "local_disk": OtherName(LMCACHE, "disk.folders", "absolute paths joined by ':', without 'file://'"),
    "max_local_disk_size": OtherName(
        LMCACHE, "disk.bytes_per_folder", "in each folder, of all ranks of a unit together", "GiB"
    ),
    "use_layerwise": OtherName(
        LMCACHE, "load.mode", "'layerwise' for loads; 'store.mode' is 'layerwise' for stores"
    ),
    "enable_async_loading": OtherName(LMCACHE, "load.mode", "'async' is the default"),
    "blocking_timeout_secs": OtherName(LMCACHE, "load.deadline_s", "in seconds, as there"),
    "cache_policy": OtherName(LMCACHE, "index.policy", POLICIES),
    "numa_mode": OtherName(LMCACHE, "host.numa_node", "the node's number; unset: the kernel decides"),
    "pre_caching_hash_algorithm": OtherName(LMCACHE, how="flexkv's keys are always SHA-256"),
    "gds_path": OtherName(LMCACHE, "disk.folders", "absolute paths; with 'disk.gds' 'on' or 'auto'"),
    "cufile_buffer_size": OtherName(LMCACHE, "gds.max_staging_bytes", "of one rank", "MiB"),
    **_all(
        "external_lookup_client p2p_host enable_pd pd_role transfer_channel",
        OtherName(LMCACHE, how=NO_PEERS),
    ),
    "remote_url": OtherName(LMCACHE, "remote.urls", A_STORE),
    "remote_serde": OtherName(LMCACHE, how="values in a store are pages as they are in host memory"),
    "enable_p2p": OtherName(f"{LMCACHE} and {TACO}", how=NO_PEERS),
    # The FlexKV of taco-project: names in its file, or variables with the prefix FLEXKV_
    "config_path": OtherName(TACO, "FLEXKV_CONFIG", "path of a YAML file with flexkv's own settings"),
    "cpu_cache_gb": OtherName(TACO, "host.bytes", "of one unit: a data-parallel rank", "GiB"),
    "ssd_cache_gb": OtherName(
        TACO, "disk.bytes_per_folder", "in each folder, where it is of all folders there", "GiB"
    ),
    "ssd_cache_dir": OtherName(TACO, "disk.folders", "absolute paths joined by ':', not ';'"),
    "enable_gds": OtherName(TACO, "disk.gds", "'on', 'auto' or 'off'"),
    "enable_layerwise_transfer": OtherName(TACO, "load.mode", "'layerwise'"),
    "eviction_policy": OtherName(f"{TACO} and {VLLM}", "index.policy", POLICIES),
    "use_hugepage_cpu_buffer": OtherName(TACO, "host.huge_pages", "'auto' or 'off'"),
    "use_ce_transfer_h2d": OtherName(
        TACO, "transfer.copy_kernel", "the opposite: false takes the copy engine"
    ),
    "use_ce_transfer_d2h": OtherName(
        TACO, "transfer.copy_kernel", "the opposite: false takes the copy engine"
    ),
    "iouring_entries": OtherName(TACO, "disk.depth", "reads and writes in flight at once on one disk"),
    "instance_num": OtherName(TACO, "host.units_per_node", "data-parallel ranks of all engines on the node"),
    "log_level": OtherName(TACO, "observe.log_level", "'debug', 'info', 'warning' or 'error'"),
    "tokens_per_block": OtherName(TACO, how=ENGINE_BLOCK),
    **_all("evict_ratio evict_start_threshold hit_reward_seconds", OtherName(TACO, how=EXACT_EVICTION)),
    **_all("cpu_layout ssd_layout gds_layout", OtherName(TACO, how=OWN_LAYOUT)),
    **_all(
        "server_client_mode server_launch_mode server_recv_port instance_id",
        OtherName(TACO, how=NO_SERVER),
    ),
    **_all(
        "enable_kv_sharing remote_layout",
        OtherName(TACO, how=NO_PEERS),
    ),
    **_all(
        "enable_remote use_mooncake_store_backend mooncake_store_config_path",
        OtherName(TACO, "remote.urls", A_STORE),
    ),
    **_all("enable_metrics py_metrics_port cpp_metrics_port", OtherName(TACO, how=ENGINE_METRICS)),
    # SGLang's HiCache
    "hicache_size": OtherName(HICACHE, "host.bytes_per_rank", "of one rank, as there", "GB"),
    "hicache_ratio": OtherName(
        HICACHE,
        "host.memory_share",
        "a share of free host memory, not of the device's pool; or 'host.bytes_per_rank'",
    ),
    "hicache_io_backend": OtherName(HICACHE, "transfer.copy_kernel", "true for 'kernel', false for 'direct'"),
    "hicache_mem_layout": OtherName(HICACHE, how=OWN_LAYOUT),
    "hicache_write_policy": OtherName(
        HICACHE,
        "disk.mode",
        "when a block goes to disk ('through', 'back', 'evict'); in host memory it is before",
    ),
    "hicache_storage_backend": OtherName(HICACHE, "disk.folders", "absolute paths joined by ':'"),
    "hicache_storage_prefetch_policy": OtherName(
        HICACHE, "load.lookup_wait_s", "seconds that a lookup waits for the disks"
    ),
    "prefetch_timeout_base": OtherName(HICACHE, "load.lookup_wait_s", "in seconds, as there"),
    # vLLM's OffloadingConnector, SimpleCPUOffloadConnector and --kv-offloading-size
    "kv_offloading_size": OtherName(
        VLLM, "host.bytes", "of all tensor-parallel ranks together, as there", "GiB"
    ),
    "num_cpu_blocks": OtherName(
        VLLM, "host.bytes", "blocks times the bytes of a block over all layers and ranks"
    ),
    "offload_prompt_only": OtherName(VLLM, "store.tokens", "'prompt' for true, 'all' for false"),
    "disk_path": OtherName(VLLM, "disk.folders", "absolute paths joined by ':'"),
    "disk_capacity_bytes": OtherName(VLLM, "disk.bytes_per_folder", "in bytes, as there"),
    "secondary_tiers": OtherName(
        VLLM, "disk.folders", "absolute paths joined by ':': the one tier behind host memory"
    ),
    "store_threshold": OtherName(
        VLLM, how="flexkv stores a block when it is computed first; see 'store.mode'"
    ),
    **_all("block_size blocks_per_chunk", OtherName(VLLM, how=ENGINE_BLOCK)),
}
"""Maps a name in another system, in lower case and without that system's prefix, to flexkv's equivalent."""

_PREFIXES = ("flexkv_", "lmcache_", "lmcache.")
_BYTES = {"GiB": 1 << 30, "MiB": 1 << 20, "GB": 10**9}


def other_system_hint(name: str, value: object, spelled: Callable[[str], str]) -> str | None:
    """Returns a hint on what to use instead of another system's setting; None if no known system uses the name.

    Args:
        name: the other system's name, as the user wrote it.
        value: the user's value, to show it with its unit if it is a size.
        spelled: spells the dotted key of a setting as the source of `name` does, for example as a variable.
    """
    plain = name.lower().replace("-", "_")
    for prefix in _PREFIXES:
        plain = plain.removeprefix(prefix)
    row = OTHER_NAMES.get(plain)
    if row is None:
        return None
    if not row.setting:
        return f"a name of {row.systems}; {row.how}"
    ours = spelled(row.setting)
    if not row.unit:
        return f"a name of {row.systems}; here it is {ours!r}: {row.how}"
    size = _with_unit(value, row.unit)
    return f"a name of {row.systems}, in {row.unit}; here it is {ours!r}, with its unit ({size}): {row.how}"


def _with_unit(value: object, unit: str) -> str:
    """Returns a size in flexkv's notation, such as '5GiB'. If the value is not a positive whole number of bytes,
    returns an example.
    """
    try:
        number = Fraction(str(value).strip())
    except (ValueError, ZeroDivisionError):
        return f"such as '5{unit}'"
    if number <= 0 or (number * _BYTES[unit]).denominator != 1:
        return f"such as '5{unit}'"
    return f"{str(value).strip().removesuffix('.0')}{unit}"
