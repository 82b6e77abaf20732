"""With several data-parallel ranks on one node, each rank is a unit with its own share of memory and disks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flexkv.adapters.vllm.engine_spec import units_on_node
from flexkv.config import load_config
from flexkv.errors import ConfigError
from flexkv.unit.build import share_of_node


def test_data_parallel_ranks_share_the_memory_unless_told_otherwise() -> None:
    assert share_of_node(load_config({}, {}), 4).host.units_per_node == 4
    assert share_of_node(load_config({}, {}), 1).host.units_per_node == 1
    assert share_of_node(load_config({"host.units_per_node": 2}, {}), 4).host.units_per_node == 2


def ranks(rank: int, local: int = 1, engine_id: str = "e_dp{}", size: int = 1, external: bool = False) -> Any:
    """Makes the configuration of one data-parallel rank. For a model without experts, each rank's configuration looks
    as if there were no other rank.
    """
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            data_parallel_size=size,
            data_parallel_size_local=local,
            data_parallel_index=rank,
            data_parallel_external_lb=external,
        ),
        kv_transfer_config=SimpleNamespace(engine_id=engine_id.format(rank)),
    )


@pytest.mark.parametrize("rank", [0, 1, 12])
def test_a_rank_that_is_not_told_of_the_others_takes_no_share(rank: int) -> None:
    with pytest.raises(ConfigError, match=rf"rank {rank}.*host\.memory_share .*set host\.units_per_node"):
        units_on_node(load_config({}, {}), ranks(rank))
    on_disk = {"host.bytes": "1GiB", "disk.folders": "/a"}
    with pytest.raises(
        ConfigError, match=r"so disk\.space_share \(disk\.bytes_per_folder is not set\) cannot"
    ):
        units_on_node(load_config(on_disk, {}), ranks(rank))


@pytest.mark.parametrize(
    ("settings", "config"),
    [
        ({"host.bytes": "1GiB"}, ranks(1)),
        ({"host.bytes_per_rank": "1GiB"}, ranks(1)),
        ({"host.bytes": "1GiB", "disk.folders": "/a", "disk.bytes_per_folder": "1GiB"}, ranks(1)),
        ({"host.units_per_node": 1}, ranks(1)),
        ({}, ranks(0, engine_id="alone")),
        ({}, ranks(1, engine_id="e_dp2")),
    ],
)
def test_a_rank_with_sizes_of_its_own_or_alone_is_one_unit(settings: dict[str, Any], config: Any) -> None:
    assert units_on_node(load_config(settings, {}), config) == 1


def test_ranks_of_a_model_with_experts_are_counted() -> None:
    assert units_on_node(load_config({}, {}), ranks(1, local=4, size=8)) == 4
    assert units_on_node(load_config({}, {}), ranks(1, local=1, size=2)) == 1


def test_ranks_that_somebody_else_starts_one_by_one_are_not() -> None:
    with pytest.raises(ConfigError, match=r"set host\.units_per_node"):
        units_on_node(load_config({}, {}), ranks(1, size=2, external=True))
