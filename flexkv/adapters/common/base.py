"""The contract between the sides of an adapter: what the scheduler's side orders a rank to load.

A rank and its unit know each other by `flexkv.facts.ranks`. From then on loads are ordered as `LoadJob`s, and every op
is reported once (`RankReports`). Plain and picklable: workers may be processes of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexkv.transfer.graph import TransferGraph


@dataclass(frozen=True, slots=True)
class LoadJob:
    """One request's load.

    Attributes:
        graph: without ops when the promise could not be kept: then every block of `lost` is reported as failed.
        sync: the step's forward needs it: all of it before it starts, or with layerwise ops each layer when it
            comes to it.
    """

    request_id: str
    graph: TransferGraph
    sync: bool
    lost: tuple[int, ...] = ()

    @property
    def by_layer(self) -> bool:
        """Whether the forward waits for its layers one by one."""
        return any(op.layerwise for op in self.graph.ops)
