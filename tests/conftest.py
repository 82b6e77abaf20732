"""What all tests share: a clean environment, and a checked length of the long-running ones."""

from __future__ import annotations

import pytest

from tests.soak import soak_factor


def pytest_configure() -> None:
    try:
        soak_factor()
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own FLEXKV_* settings must not change what a test sees."""
    from flexkv.config.model import environment_name, setting_fields
    from flexkv.config.names import ALIASES

    for name in (*map(environment_name, (*setting_fields(), *ALIASES)), "FLEXKV_CONFIG"):
        monkeypatch.delenv(name, raising=False)
