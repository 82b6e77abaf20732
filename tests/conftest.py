"""What all tests share: a clean environment, a checked length of the long-running ones, and programs beside them."""

from __future__ import annotations

import pytest

from tests.apart import Apart
from tests.beside import Beside, Ended
from tests.soak import soak_factor

BESIDE = pytest.StashKey[Beside]()
APART = pytest.StashKey[Apart]()


def pytest_configure() -> None:
    try:
        soak_factor()
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What waits for a program beside it comes last, and before that what has a session of its own. Tests marked
    `long` run where they are asked for: by a marker, or by their file or folder."""
    option = config.option
    if config.args_source is pytest.Config.ArgsSource.ARGS or option.markexpr or option.keyword:
        apart = None
    else:
        left_out = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
        apart = config.stash[APART] = Apart(config)
    items.sort(
        key=lambda item: (
            item.get_closest_marker("beside") is not None,
            apart is not None and apart.has(item),
        )
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    marks = [mark for item in session.items if (mark := item.get_closest_marker("beside")) is not None]
    commands = [mark.args for mark in marks]
    apart = session.config.stash.get(APART, None)
    if apart is not None and any(apart.has(item) for item in session.items):
        commands.insert(0, apart.command)
    if commands and not session.config.option.collectonly:
        alone = len(marks) == len(session.items)
        session.config.stash[BESIDE] = Beside(commands, alone)


def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Reports a test of another session."""
    apart = item.config.stash.get(APART, None)
    if apart is None or not apart.has(item):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in apart.reports(item, item.config.stash[BESIDE]):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


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
