"""How many data-parallel ranks share this node's memory and disks: each is an ownership unit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexkv.config import FlexKVConfig
from flexkv.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

UNITS = "host.units_per_node"


def units_on_node(settings: FlexKVConfig, vllm_config: VllmConfig) -> int:
    """Units on this node, as far as vLLM says.

    Raises:
        ConfigError: several ranks would each take the share of one. Ranks of a model without experts are told that each
            is alone: nothing but the name of their engine says that there are others.
    """
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    units = int(parallel.data_parallel_size_local)
    # Ranks of a model with experts know of each other, but for those that somebody else starts one by one.
    told = parallel.data_parallel_size > 1 and not parallel.data_parallel_external_lb
    one_of_several = transfer is not None and str(transfer.engine_id).endswith(
        f"_dp{parallel.data_parallel_index}"
    )
    if units > 1 or told or not one_of_several or settings.origin(UNITS) != "default":
        return units
    shared = [name for name, is_shared in _shares(settings) if is_shared]
    if shared:
        raise ConfigError(
            f"this is data-parallel rank {parallel.data_parallel_index}, and vLLM does not say how many there are on "
            f"this node, so {' and '.join(shared)} cannot be divided among them: set {UNITS} to their number"
        )
    return units


def _shares(settings: FlexKVConfig) -> tuple[tuple[str, bool], ...]:
    """Sizes that are a share of what the node has, and whether they are in use."""
    host, disk = settings.host, settings.disk
    return (
        ("host.memory_share (host.bytes is not set)", host.bytes is None and host.bytes_per_rank is None),
        (
            "disk.space_share (disk.bytes_per_folder is not set)",
            bool(disk.folders) and disk.bytes_per_folder is None,
        ),
    )
