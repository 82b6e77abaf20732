"""Blends a prompt whose correct result is known, on the engine's own pool, before the engine's first request.

The test checks three things. First, the layers, called one by one, compute what the model computes. Second, blending
with a ratio of 1 computes what the model computes. Third (the oracle): if the cached rows come from a full computation,
every kept row has the same keys in every later layer and the same output as in that computation, whichever rows are
kept. The oracle fails if a kept row attends to a row that it must not see, or to a row that was not written. The next
token would reveal neither fault. Rows are compared one by one, because one wrong row among a hundred right ones would
change their sum by less than rounding does.

The first two comparisons run the same kernels on the same rows. The oracle's kernels get fewer rows after the check
layer, and rounding errors add up over the layers. So the test measures on the model itself which error rounding can
explain: how much each layer's keys and the output change if the input of every layer after the check layer is rounded
once more. A wrong row is already wrong in the first of these layers, where rounding explains the smallest error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.distributed import get_tp_group
from vllm.forward_context import set_forward_context

from flexkv.adapters.vllm.blend.forward import BlendForward
from flexkv.adapters.vllm.blend.forward_rows import Planes, ReusedRows, TakenRows
from flexkv.adapters.vllm.blend.rows import BatchRows, Numbers, Runs
from flexkv.observe import get_logger

logger = get_logger(__name__)

ROWS = 96
FIRST, END = 7, 80
"""The reused rows are [FIRST, END)."""
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""The relative error that is allowed in any layer of any model, by dtype."""
ROUNDINGS = 3.0
"""Rows may be off by this many times the change that one more rounding of each layer's input causes, because a layer
rounds several times."""
LARGEST_LIMIT = 0.25
"""The largest relative error that is ever explained by rounding, however many layers the model has."""

TESTS = ("the model layer by layer", "a ratio of 1", "the oracle")


class KnownRows:
    """Cached rows that were taken from one full computation. Implements `RowSource` and `RowLayers`."""

    def __init__(self, planes: Sequence[Planes], rows: Numbers) -> None:
        self._planes, self._rows = planes, rows

    def open(self, first: int) -> KnownRows:
        return KnownRows(self._planes, self._rows)

    def choose(self, chosen: Numbers) -> None:
        self._rows = self._rows[chosen]

    def take(self, layer: int) -> Planes:
        keys, values = self._planes[layer]
        at = torch.from_numpy(self._rows).to(keys.device)
        return keys[at], values[at]

    def close(self, wait: bool = True) -> None:
        """Does nothing: no work was begun."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest relative errors that rounding explains.

    Attributes:
        keys: the limit for the keys of each layer.
        output: the limit for the model's output.
    """

    keys: Sequence[float]
    output: float

    @classmethod
    def of(cls, dtype: torch.dtype, keys: Sequence[float], output: float) -> Limits:
        """Derives the limits from the changes of the keys and of the output that one more rounding per layer causes."""
        found = [min(LARGEST_LIMIT, max(LIMITS[dtype], ROUNDINGS * moved)) for moved in (*keys, output)]
        return cls(found[:-1], found[-1])


class SelfTest:
    """The test that runs at an engine's start before blending is turned on.

    Args:
        model: a model of one of flexkv's classes, whose KV cache is allocated.
        forward: runs blended forward passes of the model.
        num_blocks: number of blocks in the engine's pool, of which none is in use.
    """

    def __init__(self, model: Any, forward: BlendForward, vllm_config: Any, num_blocks: int) -> None:
        self._model, self._forward, self._config = model, forward, vllm_config
        attention = forward.attentions[0]
        self._device = attention.kv_cache.device
        self._block_tokens = attention.get_kv_cache_spec(vllm_config).block_size
        self._blocks = -(-ROWS // self._block_tokens)
        # The test uses blocks from 1 on, because block 0 is the engine's null block.
        self._has_room = num_blocks > self._blocks and vllm_config.model_config.max_model_len >= ROWS
        at = np.arange(ROWS, dtype=np.int64)
        slots = (1 + at // self._block_tokens) * self._block_tokens + at % self._block_tokens
        self._batch = BatchRows(np.array([0, ROWS], np.int64), slots, at)
        words = np.random.default_rng(1).integers(0, vllm_config.model_config.get_vocab_size(), ROWS)
        self._ids = torch.from_numpy(words).to(self._device)
        self._positions = torch.from_numpy(at).to(self._device)

    def refusal(self) -> str:
        """Runs the test. Returns why blending must be off; empty if the test passed. If the test fails on any rank,
        every rank returns a reason."""
        if not self._has_room:
            return f"the engine has no room for a prompt of {ROWS} tokens to test it with"
        raised = ""
        try:
            with torch.inference_mode():
                errors = self._errors()
        except Exception as error:  # vLLM's internal code, which is called here, may raise anything
            logger.warning("blending's test at the start fails", exc_info=True)
            raised = f"{type(error).__name__}: {error}"
            errors = dict.fromkeys(TESTS, math.nan)
        worst = torch.tensor([errors[name] for name in TESTS], dtype=torch.float32, device=self._device)
        group = get_tp_group()
        if group.world_size > 1:
            # `amax` passes a NaN of any rank on to all ranks.
            worst = group.all_gather(worst[None], dim=0).amax(dim=0)
        found = dict(zip(TESTS, worst.cpu().tolist(), strict=True))
        wrong = [
            f"{name} is off by {of:.2g} times what rounding explains"
            for name, of in found.items()
            if not of <= 1
        ]
        return f"its test at the start fails: {raised or '; '.join(wrong)}" if wrong else ""

    def _errors(self) -> dict[str, float]:
        """Returns for each test how far its worst row is off, as a multiple of the error that rounding explains."""
        whole = self._compute(lambda: self._model(self._ids, self._positions))
        planes: list[Planes] = []
        everything = TakenRows(self._batch.positions, lambda layer, fresh: planes.append(fresh))
        layered = self._compute(lambda: self._run([], [everything]))
        dtype = self._config.model_config.dtype
        limits = self._limits(planes, layered, dtype)
        wrong = [(keys * 0 + 7, values * 0 + 7) for keys, values in planes]
        rows = np.arange(FIRST, END, dtype=np.int64)
        self._spoil(wrong)
        again = self._compute(lambda: self._run([ReusedRows(rows, KnownRows(wrong, rows), 1.0)]))
        self._spoil(wrong)
        keep = np.ones(ROWS, np.bool_)
        keep[rows] = np.random.default_rng(2).random(len(rows)) < 0.3
        found = (
            row_error(layered, whole) / LIMITS[dtype],
            row_error(again, layered) / LIMITS[dtype],
            self._oracle_error(rows, planes, keep, layered, limits),
        )
        return dict(zip(TESTS, found, strict=True))

    def _limits(self, planes: Sequence[Planes], whole: Any, dtype: torch.dtype) -> Limits:
        """Measures the error that rounding explains. Computes the prompt once more, and changes each element of the
        input of every layer after the check layer by a random amount, up to the largest error of one rounding to
        nearest.

        Args:
            planes: for each layer, the keys and values of the full computation.
            whole: the output of the full computation.
        """
        eps = torch.finfo(dtype).eps
        seed = torch.Generator().manual_seed(3)  # all ranks make the same changes

        def round_again(layer: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            positions, hidden, residual = arguments
            given = hidden if residual is None else residual
            by = torch.rand(given.shape, generator=seed, dtype=torch.float64).to(given.device) - 0.5
            moved = (given.double() * (1 + by * eps)).to(given.dtype)
            return (positions, moved, None) if residual is None else (positions, hidden, moved)

        moved: list[Planes] = []
        everything = TakenRows(self._batch.positions, lambda layer, fresh: moved.append(fresh))
        behind = self._forward.layers[self._forward.check_layer + 1 :]
        hooks = [layer.register_forward_pre_hook(round_again) for layer in behind]
        try:
            output = self._compute(lambda: self._run([], [everything]))
        finally:
            for hook in hooks:
                hook.remove()
        keys = [
            row_error(ours[0].flatten(1), theirs[0].flatten(1))
            for ours, theirs in zip(moved, planes, strict=True)
        ]
        return Limits.of(dtype, keys, row_error(output, whole))

    def _oracle_error(
        self,
        rows: Numbers,
        planes: Sequence[Planes],
        keep: NDArray[np.bool_],
        whole: Any,
        limits: Limits,
    ) -> float:
        """Returns the largest error of a kept row, as a multiple of the error that rounding explains. Compares the
        row's keys in each layer after the check layer, and its output. The rows that are not kept are taken from a full
        computation.

        Args:
            rows: the numbers of the reused rows.
            planes: for each layer, the keys and values of the full computation.
            keep: which rows are kept.
            whole: the output of the full computation.
        """
        later = range(self._forward.check_layer + 1, len(planes))
        seen: dict[int, Any] = {}

        def look(layer: int) -> Any:
            return lambda attention, arguments: seen.update({layer: arguments[1].clone()})

        hooks = [self._forward.attentions[layer].register_forward_pre_hook(look(layer)) for layer in later]
        choose, self._forward.choose = self._forward.choose, lambda batch, reused, difference: keep
        try:
            out = self._compute(lambda: self._run([ReusedRows(rows, KnownRows(planes, rows), 0.3)]))
        finally:
            self._forward.choose = choose
            for hook in hooks:
                hook.remove()
        kept = torch.from_numpy(np.flatnonzero(keep)).to(self._device)
        errors = [
            row_error(seen[layer], planes[layer][0][kept].flatten(1)) / limits.keys[layer] for layer in later
        ]
        # Python's `max` is not used, because it may ignore a NaN.
        return float(torch.tensor([*errors, row_error(out[kept], whole[kept]) / limits.output]).amax())

    def _run(self, reused: Sequence[ReusedRows], taken: Sequence[TakenRows] = ()) -> Any:
        hidden, _ = self._forward.run(self._ids, self._positions, self._batch, reused, taken)
        return hidden

    def _spoil(self, planes: Sequence[Planes]) -> None:
        slots = torch.from_numpy(self._batch.slots).to(self._device)
        for attention, (keys, values) in zip(self._forward.attentions, planes, strict=True):
            attention.impl.do_kv_cache_update(attention, keys, values, attention.kv_cache, slots)

    def _compute(self, compute: Any) -> Any:
        table = torch.arange(1, 1 + self._blocks, dtype=torch.int32, device=self._device)[None]
        slots = torch.from_numpy(self._batch.slots).to(self._device)
        whole = Runs.of(self._batch, self._batch.positions)
        metadata = self._forward.metadata(whole, table, slots)
        names = [attention.layer_name for attention in self._forward.attentions]
        with set_forward_context(
            dict.fromkeys(names, metadata),
            self._config,
            num_tokens=ROWS,
            slot_mapping=dict.fromkeys(names, slots),
            # Without `skip_compiled`, vLLM would compile the model in this call. It must be compiled in a call of
            # vLLM's own.
            skip_compiled=True,
        ):
            return compute()


def row_error(found: Any, wanted: Any) -> float:
    """Returns the largest relative error of a row: the norm of the difference between the found row and the wanted row,
    divided by the norm of the wanted row. Both arrays are [rows, elements]."""
    off, length = (found.float() - wanted.float()).norm(dim=1), wanted.float().norm(dim=1)
    return float((off / length).amax())
