"""Counts the ranks of an engine on one node. Each rank has its own cache, and all caches on a node share its memory and
disks."""

from __future__ import annotations


def units_on_node(dp_size: int, tp_size: int, pp_size: int, nnodes: int) -> int:
    """Number of ranks on each node. SGLang spreads every data-parallel replica over all nodes: it first divides the
    pipeline stages among the nodes and then, if there are more nodes than stages, the tensor-parallel ranks of each
    stage. Data parallelism of the attention does not multiply the ranks, because it splits the `tp_size` ranks."""
    return dp_size * max(pp_size // nnodes, 1) * (tp_size // max(nnodes // pp_size, 1))
