"""One blended prefill: takes reused rows from the cache, and computes all other rows and the reused ones that differ
most.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flexkv.blend.plan import BlendPlan, Rows, budget_of, check_layers_exist, rows_to_keep
from flexkv.blend.rotation import KeyRotation
from flexkv.blend.runner.attention import attend
from flexkv.blend.runner.model import LayeredModel
from flexkv.blend.runner.reused import ReusedLayers, ReusedRows


@dataclass(frozen=True, slots=True)
class BlendReport:
    """Report of a prefill.

    Attributes:
        tokens: tokens of the prompt, without those that the engine had.
        reused: rows of these that the cache covered.
        computed: the rows that each layer computed, int64 ascending.
        off: why nothing was blended; empty if it was.
        lost: number and reason of each segment whose pages failed to arrive while others were already in use; the
            prompt was restarted without it.
    """

    tokens: int
    reused: int
    computed: list[Rows] = field(default_factory=list)
    off: str = ""
    lost: tuple[str, ...] = ()


class Prefill(NamedTuple):
    """Result of a prefill.

    Attributes:
        logits: logits of the prompt's last token, [1, vocabulary].
        kv: a transformers `DynamicCache` with all tokens, including those that the engine had.
    """

    logits: Any
    kv: Any
    report: BlendReport


class Blender:
    """Computes prompts of one model, layer by layer."""

    def __init__(self, model: LayeredModel, plan: BlendPlan) -> None:
        check_layers_exist(plan, len(model.layers))
        self._model = model
        self._plan = plan
        self.rotation = KeyRotation(model.rope, model.shape.heads, model.shape.dtype, model.frequencies)

    def run(
        self, tokens: Any, past: list[tuple[Any, Any]], reused: ReusedRows
    ) -> tuple[Any, Any, list[Rows]]:
        """Logits [1, vocabulary], keys and values of every layer, and the rows computed in each.

        Args:
            tokens: int64 [rows], the tokens that the engine does not have.
            past: each layer's keys and values [heads, tokens, dim] that the engine has; all of the same length.
            reused: which rows the cache covers, and their keys and values.

        Raises:
            LostPages: some rows that the cache promised did not arrive.
        """
        first = past[0][0].shape[1] if past else 0
        kept = np.arange(len(tokens), dtype=np.int64)
        if self._plan.ratios[0] == 0.0:
            # The last row is needed for the logits, even if it is covered.
            kept = np.union1d(np.flatnonzero(~reused.covered), kept[-1:])
        hidden = self._model.embed(tokens[torch.from_numpy(kept)])
        computed = []
        with reused.open(self.rotation, past) as old:
            for layer in range(len(self._model.layers)):
                hidden, kept = self._layer(layer, hidden, kept, first, old)
                computed.append(kept)
        return self._model.logits(hidden[-1:]), old.kept, computed

    def _layer(self, layer: int, hidden: Any, kept: Rows, first: int, old: ReusedLayers) -> tuple[Any, Rows]:
        """The layer's output for the kept rows, and these rows."""
        model = self._model
        query, key, value = model.project(layer, hidden, torch.from_numpy(kept + first))
        keys, values = old.layer(layer)
        ratio = self._plan.ratio_at(layer)
        if ratio is not None and self._plan.ratios[0] > 0.0:
            cached = keys[:, torch.from_numpy(kept + first)]
            going_on = torch.from_numpy(self._choose(key, cached, kept, old.covered, ratio))
            kept = kept[going_on.numpy()]
            hidden, query, key, value = (rows[going_on] for rows in (hidden, query, key, value))
        at = torch.from_numpy(kept + first)
        # Also in layers before the first check layer (`BlendPlan`): rows that are not covered would otherwise be zeros.
        keys[:, at] = key.transpose(0, 1)
        values[:, at] = value.transpose(0, 1)
        attended = attend(query, keys, values, at, model.scale(layer))
        return model.finish(layer, hidden, attended), kept

    def _choose(self, fresh: Any, cached: Any, kept: Rows, covered: NDArray[np.bool_], ratio: float) -> Rows:
        """The positions within `kept` of the rows to keep computing."""
        distance = (fresh.transpose(0, 1).float() - cached.float()).square().sum(dim=(0, 2))
        reusable = covered[kept]
        reusable[-1] = False  # the last row is needed for the logits
        budget = budget_of(ratio, int(np.count_nonzero(covered)))
        return rows_to_keep(distance.double().numpy(), reusable, budget)
