"""A blended prefill: takes reused rows from the cache, and computes all other rows as well as those reused rows that
differ most from freshly computed ones.
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
        tokens: number of tokens of the prompt, without those that the caller already had.
        reused: number of those tokens whose rows the cache covered.
        computed: for each layer, the numbers of the rows that it computed, int64, ascending.
        off: why blending is off for the model; empty if it is on.
        lost: number and reason, as text, of each segment whose pages did not arrive. The prompt was restarted without
            the cached rows of that segment.
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
        kv: a transformers `DynamicCache` with all tokens, including those that the caller already had.
        report: what was reused and computed.
    """

    logits: Any
    kv: Any
    report: BlendReport


class Blender:
    """Computes the prompts of one model, layer by layer.

    Raises:
        ConfigError: the plan has a check layer that the model lacks.
    """

    def __init__(self, model: LayeredModel, plan: BlendPlan) -> None:
        check_layers_exist(plan, len(model.layers))
        self._model = model
        self._plan = plan
        self.rotation = KeyRotation(model.rope, model.shape.heads, model.shape.dtype, model.frequencies)

    def run(
        self, tokens: Any, past: list[tuple[Any, Any]], reused: ReusedRows
    ) -> tuple[Any, Any, list[Rows]]:
        """Computes a prompt.

        Args:
            tokens: the tokens that the caller does not have yet, int64 [rows].
            past: each layer's keys and values [heads, tokens, dim] of the tokens that the caller already has, all of
                the same length; empty if there are no such tokens.
            reused: which rows the cache covers, and their keys and values.

        Returns:
            The last token's logits [1, vocabulary]; every layer's keys and values; and the rows that each layer
            computed.

        Raises:
            LostPages: some rows that the cache promised did not arrive.
        """
        first = past[0][0].shape[1] if past else 0
        kept = np.arange(len(tokens), dtype=np.int64)
        if self._plan.ratios[0] == 0.0:
            # The last row is computed even if the cache covers it, because its logits are needed.
            kept = np.union1d(np.flatnonzero(~reused.covered), kept[-1:])
        hidden = self._model.embed(tokens[torch.from_numpy(kept)])
        computed = []
        with reused.open(self.rotation, past) as old:
            for layer in range(len(self._model.layers)):
                hidden, kept = self._layer(layer, hidden, kept, first, old)
                computed.append(kept)
        return self._model.logits(hidden[-1:]), old.kept, computed

    def _layer(self, layer: int, hidden: Any, kept: Rows, first: int, old: ReusedLayers) -> tuple[Any, Rows]:
        """Computes one layer for the rows `kept`. At a check layer, fewer rows go on to the next layer.

        Returns:
            The layer's output for the rows that go on, and the numbers of those rows.
        """
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
        # Computed rows replace the cached rows in every layer, even before the first check layer. Otherwise, rows that
        # the cache does not cover would stay zeros.
        keys[:, at] = key.transpose(0, 1)
        values[:, at] = value.transpose(0, 1)
        attended = attend(query, keys, values, at, model.scale(layer))
        return model.finish(layer, hidden, attended), kept

    def _choose(self, fresh: Any, cached: Any, kept: Rows, covered: NDArray[np.bool_], ratio: float) -> Rows:
        """Chooses the rows to keep computing; returns their positions within `kept`.

        Args:
            fresh: the computed keys of the rows `kept`, [rows, heads, dim].
            cached: the cached keys of the same rows, [heads, rows, dim].
            kept: numbers of the rows that were computed so far.
            covered: whether the cache covers each row of the prompt, bool.
            ratio: share of the covered rows to keep.
        """
        distance = (fresh.transpose(0, 1).float() - cached.float()).square().sum(dim=(0, 2))
        reusable = covered[kept]
        reusable[-1] = False  # the last row is always computed, because its logits are needed
        budget = budget_of(ratio, int(np.count_nonzero(covered)))
        return rows_to_keep(distance.double().numpy(), reusable, budget)
