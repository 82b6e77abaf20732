"""How much longer the long-running tests run: FLEXKV_SOAK, 1 unless `make soak` says more."""

from __future__ import annotations

import os

import pytest

SOAK_VARIABLE = "FLEXKV_SOAK"


def soak_factor() -> int:
    """How many times longer than usual a test marked `soak` runs.

    Raises:
        ValueError: FLEXKV_SOAK is not a whole number of at least 1.
    """
    text = os.environ.get(SOAK_VARIABLE, "1")
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise ValueError(f"{SOAK_VARIABLE}={text!r}: expected a whole number from 1")
    return int(text)


def soak_rounds(usual: int = 1) -> pytest.MarkDecorator:
    """Runs a test for each `soak_round` from 0: `usual` rounds, times the factor. Goes with `pytest.mark.soak`.

    Place it above other parametrisations: the rounds of one case then run in a row and share an engine.
    """
    return pytest.mark.parametrize("soak_round", range(usual * soak_factor()))
