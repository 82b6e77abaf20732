"""flexkv counts the ranks that share a node correctly for each of the ways in which SGLang splits a model."""

from __future__ import annotations

import pytest

from flexkv.adapters.sglang.node_units import units_on_node


@pytest.mark.parametrize(
    ("dp", "tp", "pp", "nodes", "units"),
    [
        (1, 1, 1, 1, 1),
        (1, 8, 1, 1, 8),
        (4, 2, 1, 1, 8),
        (2, 2, 2, 1, 8),
        # On two nodes, the ranks of a replica are spread over both nodes.
        (1, 16, 1, 2, 8),
        (2, 16, 1, 2, 16),
        (1, 8, 2, 2, 8),
        (1, 8, 4, 2, 16),
        (1, 16, 2, 4, 8),
    ],
)
def test_all_ranks_of_all_replicas_count(dp: int, tp: int, pp: int, nodes: int, units: int) -> None:
    assert units_on_node(dp, tp, pp, nodes) == units
    assert units * nodes == dp * tp * pp
