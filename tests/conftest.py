"""What all tests share: a clean environment, a checked length of the long-running ones, and programs beside them."""

from __future__ import annotations

import pytest

from tests.apart import WAIT_S, Apart, runs_apart
from tests.beside import Beside, Ended
from tests.soak import soak_factor

BESIDE = pytest.StashKey[Beside]()
APART = pytest.StashKey[Apart]()
IDS_APART = pytest.StashKey[frozenset[str]]()


def pytest_configure() -> None:
    try:
        soak_factor()
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that wait for a program beside them come last.

    A run of everything (no path, `-m`, `-k` or `--lf`, from the root) leaves out tests marked `long`, and has some in a
    session of their own, which come before those.
    """
    option = config.option
    chosen = option.markexpr or option.keyword or getattr(option, "lf", False)
    everything = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not chosen
    apart = {item for item in items if everything and runs_apart(item)}
    if everything:
        left_out = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    for item in apart:
        item.add_marker(pytest.mark.timeout(WAIT_S), append=False)
    items.sort(key=lambda item: (item.get_closest_marker("beside") is not None, item in apart))
    config.stash[IDS_APART] = frozenset(item.nodeid for item in apart)


def pytest_collection_finish(session: pytest.Session) -> None:
    marks = [mark for item in session.items if (mark := item.get_closest_marker("beside")) is not None]
    commands = [mark.args for mark in marks]
    config = session.config
    if config.option.collectonly:
        return
    if any(item.nodeid in config.stash[IDS_APART] for item in session.items):
        config.stash[APART] = Apart(config)
        commands.insert(0, config.stash[APART].command)
    if commands:
        config.stash[BESIDE] = Beside(commands, alone=len(marks) == len(session.items))


def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Reports a test of another session."""
    if item.nodeid not in item.config.stash[IDS_APART]:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in item.config.stash[APART].reports(item, item.config.stash[BESIDE]):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (running := session.config.stash.get(BESIDE, None)) is not None:
        running.close()
    if (apart := session.config.stash.get(APART, None)) is not None:
        apart.close()


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
