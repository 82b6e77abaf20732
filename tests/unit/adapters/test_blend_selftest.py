"""What blending's test at the start compares: each row by itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flexkv.adapters.vllm.blend.selftest import LIMITS, ROWS, row_error

WIDTH = 256


def rounded(dtype: Any) -> tuple[Any, Any]:
    """Rows, and the same with a rounding of the dtype."""
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
    """A model's first token may have an output that is a hundred times as long as the others'."""
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
