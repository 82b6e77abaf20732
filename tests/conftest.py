"""What all tests share: a clean environment, and how long the long-running ones run."""

from __future__ import annotations

import os

import pytest

SOAK_VARIABLE = "FLEXKV_SOAK"


@pytest.fixture(scope="session")
def soak_factor() -> int:
    """How many times longer than usual a test marked `soak` shall run: FLEXKV_SOAK, default 1.

    Raises:
        ValueError: it is no whole number from 1.
    """
    text = os.environ.get(SOAK_VARIABLE, "1")
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{SOAK_VARIABLE}={text!r}: expected a whole number from 1")
    return int(text)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own FLEXKV_* settings must not change what a test sees."""
    from flexkv.config.model import environment_name, setting_fields
    from flexkv.config.names import ALIASES

    for name in (*map(environment_name, (*setting_fields(), *ALIASES)), "FLEXKV_CONFIG"):
        monkeypatch.delenv(name, raising=False)
