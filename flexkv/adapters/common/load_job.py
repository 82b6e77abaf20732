"""The contract between the sides of an adapter: the loads that the scheduler's side orders from a rank.

A rank and its unit introduce themselves with the records of `flexkv.facts.ranks`. From then on the scheduler's side
orders loads as `LoadJob`s, and the rank reports every op once (`RankReports`). These records are plain and picklable,
because workers may run in separate processes.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexkv.transfer.graph import TransferGraph


@dataclass(frozen=True, slots=True)
class LoadJob:
    """One request's load.

    Attributes:
        graph: has no ops when the promise could not be kept; every block of `lost` is then reported as failed.
        sync: the step's forward pass needs the load: all of it before the forward pass starts or, with layerwise ops,
            each layer before that layer is read.
    """

    request_id: str
    graph: TransferGraph
    sync: bool
    lost: tuple[int, ...] = ()

    @property
    def by_layer(self) -> bool:
        """Whether the forward pass waits for the load's layers one by one."""
        return any(op.layerwise for op in self.graph.ops)
