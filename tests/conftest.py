"""Configuration of all tests: removes the developer's settings, checks FLEXKV_SOAK, and decides how `make test` divides
the tests among its workers.
"""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest

from tests.soak import soak_factor

LONGEST_FIRST = (
    "sanitizers",
    "engines_sglang",
    "native",
    "engines_vllm33",
    "engines",
    "faults",
    "gpu",
    "unit",
)
"""Folders of tests in the order in which a run executes them. Slow folders come first (see `durations.md`), so that no
worker starts minutes of work at the end.
"""

TOGETHER = ("sanitizers", "engines_sglang", "native", "engines_vllm33")
"""Folders of which all tests run on one worker, because the files of such a folder share a build, or an engine that is
started once. A run takes at least as long as the longest of these folders.
"""


ALONE = {"FLEXKV_PEERS_SHARE": "off"}
"""Environment variables of all tests. Units do not share pages by default, because units of other tests, and of other
users' test runs, have the same models. Tests of sharing override this setting.
"""


def pytest_configure() -> None:
    os.environ.update(ALONE)  # needed before any test, because the fork servers of engines start earlier
    try:
        soak_factor()
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _rank(_folder(item.nodeid)))


def pytest_collection_finish() -> None:
    """Keeps the garbage collector from scanning about a million objects again and again. The import of the test modules
    has made them, and they stay alive."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Replaces the scheduler of pytest-xdist. All tests of a file, or of a folder in `TOGETHER`, go to one worker."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            folder = _folder(nodeid)
            return folder if folder in TOGETHER else nodeid.partition("::")[0]

    # otherwise the scheduler would change the order of `LONGEST_FIRST`
    config.option.loadscopereorder = False
    return Scheduler(config, log)


def _folder(nodeid: str) -> str:
    """Returns the name of the folder in `tests` that contains the test, or an empty string if the test is directly in
    `tests`."""
    parts = nodeid.partition("::")[0].split("/")
    return parts[1] if len(parts) > 2 and parts[0] == "tests" else ""


def _rank(folder: str) -> int:
    return LONGEST_FIRST.index(folder) if folder in LONGEST_FIRST else len(LONGEST_FIRST)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes a developer's own FLEXKV_* settings, so that they do not change what a test does."""
    from flexkv.config.model import setting_fields
    from flexkv.config.names import ALIASES, environment_name

    for name in (*map(environment_name, (*setting_fields(), *ALIASES)), "FLEXKV_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ALONE.items():
        monkeypatch.setenv(name, value)
    from flexkv.cache.tiers.running_peers import plan

    monkeypatch.setattr(plan, "usual_share", lambda config: "off")
