"""Counts the ranks of an engine that share a node's memory and disks: each rank has a cache of its own."""

from __future__ import annotations

from typing import Protocol


class Widths(Protocol):
    """SGLang's parallel widths. Attention data parallelism splits `tp_size` and is not a width of its own."""

    @property
    def dp_size(self) -> int: ...
    @property
    def tp_size(self) -> int: ...
    @property
    def pp_size(self) -> int: ...
    @property
    def nnodes(self) -> int: ...


def units_on_node(widths: Widths) -> int:
    """Ranks on each node. SGLang spreads every data-parallel replica over all nodes: it first divides pipeline stages
    among the nodes and then, where there are more nodes than stages, the tensor-parallel ranks of each stage."""
    stages = max(widths.pp_size // widths.nnodes, 1)
    nodes_of_a_stage = max(widths.nnodes // widths.pp_size, 1)
    return widths.dp_size * stages * (widths.tp_size // nodes_of_a_stage)
