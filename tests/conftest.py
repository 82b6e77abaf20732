"""What all tests share: a clean environment, a checked length of the long-running ones, and programs beside them."""

from __future__ import annotations

import pytest

from tests.beside import Beside, Ended
from tests.soak import soak_factor

BESIDE = pytest.StashKey[Beside]()


def pytest_configure() -> None:
    try:
        soak_factor()
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that wait for a program beside them come last."""
    items.sort(key=lambda item: item.get_closest_marker("beside") is not None)


def pytest_collection_finish(session: pytest.Session) -> None:
    marks = [mark for item in session.items if (mark := item.get_closest_marker("beside")) is not None]
    if marks and not session.config.option.collectonly:
        alone = len(marks) == len(session.items)
        session.config.stash[BESIDE] = Beside([mark.args for mark in marks], alone)


def pytest_sessionfinish(session: pytest.Session) -> None:
    running = session.config.stash.get(BESIDE, None)
    if running is not None:
        running.close()


@pytest.fixture
def beside(request: pytest.FixtureRequest) -> Ended:
    """How the program of this test's `beside` mark ended."""
    return request.config.stash[BESIDE].ended(request.node.get_closest_marker("beside").args)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own FLEXKV_* settings must not change what a test sees."""
    from flexkv.config.model import setting_fields
    from flexkv.config.names import ALIASES, environment_name

    for name in (*map(environment_name, (*setting_fields(), *ALIASES)), "FLEXKV_CONFIG"):
        monkeypatch.delenv(name, raising=False)
