"""The message with which the scheduler's side of an adapter orders a rank to load pages.

A rank and its unit first exchange the records of `flexkv.facts.ranks`. Then the scheduler's side sends each load as a
`LoadJob`, and the rank reports every op once (`RankReports`). All these records are plain and picklable, because
workers may run in separate processes.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexkv.transfer.graph import TransferGraph


@dataclass(frozen=True, slots=True)
class LoadJob:
    """One request's load.

    Attributes:
        request_id: the engine's id of the request.
        graph: the load's ops; a graph without ops if the promised pages cannot be loaded any more.
        sync: whether the step's forward pass reads the loaded blocks. If so, the forward pass waits for the complete
            load before it starts or, with layerwise ops, for each layer before it reads the layer.
        lost: engine blocks to report as failed if `graph` has no ops; empty otherwise.
    """

    request_id: str
    graph: TransferGraph
    sync: bool
    lost: tuple[int, ...] = ()

    @property
    def by_layer(self) -> bool:
        """Whether the forward pass waits for each layer of the load separately."""
        return any(op.layerwise for op in self.graph.ops)
