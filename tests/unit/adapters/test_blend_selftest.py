"""Tests the self-test that blending runs when it starts. The self-test compares each row of a result separately."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from flexkv.adapters.vllm.blend import selftest
from flexkv.adapters.vllm.blend.forward import BlendForward
from flexkv.adapters.vllm.blend.rows import Runs
from flexkv.adapters.vllm.blend.selftest import LARGEST_LIMIT, LIMITS, ROUNDINGS, ROWS, Limits, row_error
from tests.unit.adapters.deep_model import DeepModel, make_test

WIDTH = 256


def rounded(dtype: Any) -> tuple[Any, Any]:
    """Returns two versions of the same random rows: one with random errors of the dtype's precision, and one
    without.
    """
    exact = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    wanted = exact.to(dtype)
    noise = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2)) * torch.finfo(dtype).eps
    return (wanted.float() * (1 + noise)).to(dtype), wanted


@pytest.mark.parametrize("dtype", list(LIMITS))
def test_rounding_passes_and_one_wrong_row_does_not(dtype: Any) -> None:
    found, wanted = rounded(dtype)
    assert row_error(found, wanted) < LIMITS[dtype] / 2
    found[41] *= 1.2
    assert row_error(found, wanted) > 2 * LIMITS[dtype]


def test_control_all_rows_together_hide_it() -> None:
    found, wanted = rounded(torch.bfloat16)
    found[41] *= 1.2
    together = float((found.float() - wanted.float()).norm() / wanted.float().norm())
    assert together < LIMITS[torch.bfloat16]


def test_a_row_beside_a_much_larger_one_is_seen() -> None:
    """An error in one row is noticed although another row is much larger. In real models the output for the first token
    may be a hundred times larger than the others.
    """
    found, wanted = rounded(torch.float32)
    found[0] *= 1000
    wanted[0] *= 1000
    assert row_error(found, wanted) < LIMITS[torch.float32]
    found[41] *= 1.2
    assert row_error(found, wanted) > 0.1


def test_what_is_no_number_is_no_number() -> None:
    found, wanted = rounded(torch.float32)
    found[3, 3] = math.nan
    assert math.isnan(row_error(found, wanted))


# --- deep models, in which rounding errors add up ---

DEEP, GAIN = 48, 2.5
"""Number of layers, and scale of the weights, of a bfloat16 model. Even its correct rows differ from the expected ones
by more than the limit that holds for every model (`LIMITS`).
"""


def refusal_of(
    patch: pytest.MonkeyPatch, layers: int, break_it: Any = None, roundings: float = ROUNDINGS
) -> str:
    patch.setattr(selftest, "ROUNDINGS", roundings)
    test = make_test(patch, DeepModel(layers, torch.bfloat16, GAIN), torch.bfloat16)
    if break_it is not None:
        break_it(test._forward)
    return test.refusal()


def test_depth_does_not_refuse_a_right_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal_of(monkeypatch, DEEP) == ""


def test_control_a_limit_that_does_not_know_the_model_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "the oracle is off by" in refusal_of(monkeypatch, DEEP, roundings=0.0)
    assert refusal_of(monkeypatch, 4, roundings=0.0) == "", "a flat model has no need of it"


def one_causal_sequence(blended: BlendForward) -> None:
    blended.runs = lambda batch, kept: Runs(
        np.array([0, len(kept)], np.int32), np.array([batch.rows], np.int32), np.zeros(1, np.int64)
    )


def no_rows(blended: BlendForward) -> None:
    blended._put = lambda *given: None  # type: ignore[method-assign]


def one_row_of_one_layer(blended: BlendForward) -> None:
    put = blended._put

    def all_but_one(layer: int, cached: Any, slots: Any) -> None:
        if layer != blended.check_layer + 1:
            return put(layer, cached, slots)
        attention, (keys, values) = blended.attentions[layer], cached.take(layer)
        attention.impl.do_kv_cache_update(attention, keys[:-1], values[:-1], attention.kv_cache, slots[:-1])
        return None

    blended._put = all_but_one  # type: ignore[method-assign]


def lengths_one_too_long(blended: BlendForward) -> None:
    """Makes the rows of every run attend to one row too many, the next row. The run at position 0 stays correct."""

    def runs(batch: Any, kept: Any) -> Runs:
        right = Runs.of(batch, kept)
        longer = np.minimum(right.lengths + (batch.positions[kept[right.starts[:-1]]] > 0), batch.rows)
        return Runs(right.starts, longer.astype(np.int32), right.sequences)

    blended.runs = runs


def a_neighbours_cached_row(blended: BlendForward) -> None:
    """Makes one row use the key and value of the next position, in all layers."""

    def shifted(layer: int, cached: Any, slots: Any) -> None:
        attention, (keys, values) = blended.attentions[layer], cached.take(layer)
        for plane in (keys, values):
            plane[3] = plane[4].clone()
        attention.impl.do_kv_cache_update(attention, keys, values, attention.kv_cache, slots)

    blended._put = shifted  # type: ignore[method-assign]


def no_rows_of_a_late_layer(blended: BlendForward) -> None:
    put = blended._put

    def all_but_one(layer: int, cached: Any, slots: Any) -> None:
        if layer != len(blended.layers) - 2:
            put(layer, cached, slots)

    blended._put = all_but_one  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "wrong",
    [
        one_causal_sequence,
        no_rows,
        one_row_of_one_layer,
        lengths_one_too_long,
        a_neighbours_cached_row,
        no_rows_of_a_late_layer,
    ],
)
def test_a_wrong_row_of_a_deep_model_is_refused(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    found = refusal_of(monkeypatch, DEEP, wrong)
    assert found.startswith("its test at the start fails: the oracle is off by"), found


def test_control_a_larger_limit_passes_over_a_late_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "LARGEST_LIMIT", 0.5)
    assert refusal_of(monkeypatch, DEEP, no_rows_of_a_late_layer) == ""


def test_layers_that_compute_all_rows_are_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """For layers up to the check layer, the self-test measures no rounding, because the compared runs compute the same
    bits there.
    """
    moved: list[float] = []

    def of(dtype: Any, keys: Any, output: float) -> Limits:
        moved.extend(keys)
        return Limits(keys, output)

    blended = make_test(monkeypatch, DeepModel(DEEP, torch.bfloat16, GAIN), torch.bfloat16)
    monkeypatch.setattr(Limits, "of", of)
    blended.refusal()
    check_layer = blended._forward.check_layer
    assert moved[: check_layer + 1] == [0.0] * (check_layer + 1)
    assert all(moved[check_layer + 1 :])


def test_no_depth_explains_a_row_that_is_off_by_a_quarter() -> None:
    limits = Limits.of(torch.bfloat16, [0.001, 0.03, 5.0], 0.3)
    assert limits == Limits([LIMITS[torch.bfloat16], 0.03 * ROUNDINGS, LARGEST_LIMIT], LARGEST_LIMIT)
    assert Limits.of(torch.bfloat16, [math.nan], math.nan) == Limits([0.05], 0.05)


@pytest.mark.parametrize("scaled", [False, True], ids=["own limit", "control"])
@pytest.mark.parametrize("test", [0, 1], ids=selftest.TESTS[:2])
def test_what_the_same_kernels_compute_has_no_part_in_the_depths_limit(
    monkeypatch: pytest.MonkeyPatch, test: int, scaled: bool
) -> None:
    """The larger limit for deep models does not hold for the self-test's comparisons of two runs with the same kernels.
    In this test, the outputs of two such runs differ by more than the limit that holds for every model, but by less
    than the limit for a deep model. In the control, the general limit is larger than the difference.
    """
    off = 3 * LIMITS[torch.bfloat16]
    blended = make_test(monkeypatch, DeepModel(DEEP, torch.bfloat16, GAIN), torch.bfloat16)
    if scaled:
        monkeypatch.setattr(selftest, "LIMITS", {torch.bfloat16: 2 * off})
    run, calls = blended._run, []

    def moved(reused: Any, taken: Any = ()) -> Any:
        calls.append(reused)
        # The first call runs layer by layer. The second measures rounding errors. The third computes all reused rows
        # again (ratio 1).
        return run(reused, taken) * (1 + off * (len(calls) == 1 + 2 * test))

    monkeypatch.setattr(blended, "_run", moved)
    found = blended.refusal()
    assert (f"{selftest.TESTS[test]} is off by" in found) != scaled
