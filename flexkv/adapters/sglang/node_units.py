"""Counts the ranks of an engine that share a node's memory and disks: each rank has its own cache."""

from __future__ import annotations


def units_on_node(dp_size: int, tp_size: int, pp_size: int, nnodes: int) -> int:
    """Ranks on each node. SGLang spreads every data-parallel replica over all nodes: it first divides pipeline stages
    among the nodes and then, if there are more nodes than stages, the tensor-parallel ranks of each stage. Attention
    data parallelism splits `tp_size` and is not a width of its own."""
    return dp_size * max(pp_size // nnodes, 1) * (tp_size // max(nnodes // pp_size, 1))
