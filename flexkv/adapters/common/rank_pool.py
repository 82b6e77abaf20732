"""An adapter's description of one KV group of a rank's pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flexkv.facts.ranks import GroupFacts
from flexkv.layout.format_id import FormatId
from flexkv.layout.tensor import dtype_name


@dataclass(frozen=True, slots=True)
class RankPool:
    """One rank's pool of one KV group.

    Attributes:
        view: `KvView` of the pool; its block numbers are the engine's.
        format_id: the format of the group's blocks.
        block_tokens: tokens per block.
        tensors: the tensors that hold the group's memory.
        layers: number of the model's layers in the group.
        heads: number of heads of K and V on this rank; 0 if unknown, or if the rows of K and V differ in size.
        replicas: number of consecutive ranks that hold the same bytes.
    """

    view: Any
    format_id: FormatId
    block_tokens: int
    tensors: Sequence[Any]
    layers: int
    heads: int = 0
    replicas: int = 1

    @property
    def facts(self) -> GroupFacts:
        return GroupFacts.of_view(self.view, str(self.format_id), self.heads, dtype_name(self.tensors[0]))
