"""Makes tests marked `soak` run longer. FLEXKV_SOAK is the factor: 1 by default, and larger under `make soak`."""

from __future__ import annotations

import os

import pytest

SOAK_VARIABLE = "FLEXKV_SOAK"


def soak_factor() -> int:
    """Returns the factor by which a test marked `soak` runs longer than usual.

    Raises:
        ValueError: FLEXKV_SOAK is not a whole number of at least 1.
    """
    text = os.environ.get(SOAK_VARIABLE, "1")
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise ValueError(f"{SOAK_VARIABLE}={text!r}: expected a whole number from 1")
    return int(text)


def soak_rounds(usual: int = 1) -> pytest.MarkDecorator:
    """Parametrises a test with `soak_round`, which counts from 0: `usual` rounds, times the factor. Use it with
    `pytest.mark.soak`.

    Place it above other parametrisations, so that the rounds of one case run in a row and share an engine.
    """
    return pytest.mark.parametrize("soak_round", range(usual * soak_factor()))
