"""What all tests share: a clean environment, a check of FLEXKV_SOAK, and how `make test` divides them among its
workers.
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
"""Folders in the order in which a run takes them, by `durations.md`, so that no worker starts minutes of work last."""

TOGETHER = ("sanitizers", "engines_sglang", "native", "engines_vllm33")
"""Folders that stay on one worker: their files share a build, or an engine that is started once. A run takes at least
as long as the longest of them."""


ALONE = {"FLEXKV_PEERS_SHARE": "off"}
"""Units of other tests, and of other people's runs, have the same models: only tests of sharing find them."""


def pytest_configure() -> None:
    os.environ.update(ALONE)  # for the processes that serve engines, which start before any test
    try:
        soak_factor()
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _rank(_folder(item.nodeid)))


def pytest_collection_finish() -> None:
    """Excludes the million objects that the tests' modules imported from all later garbage collections."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Replaces pytest-xdist's `--dist`: a file, or a folder of `TOGETHER`, goes to one worker as a whole."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            folder = _folder(nodeid)
            return folder if folder in TOGETHER else nodeid.partition("::")[0]

    config.option.loadscopereorder = False  # the order is `LONGEST_FIRST`
    return Scheduler(config, log)


def _folder(nodeid: str) -> str:
    """The folder in `tests` that a test is in; empty for one that is elsewhere."""
    parts = nodeid.partition("::")[0].split("/")
    return parts[1] if len(parts) > 2 and parts[0] == "tests" else ""


def _rank(folder: str) -> int:
    return LONGEST_FIRST.index(folder) if folder in LONGEST_FIRST else len(LONGEST_FIRST)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own FLEXKV_* settings must not change what a test sees."""
    from flexkv.config.model import setting_fields
    from flexkv.config.names import ALIASES, environment_name

    for name in (*map(environment_name, (*setting_fields(), *ALIASES)), "FLEXKV_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ALONE.items():
        monkeypatch.setenv(name, value)
    from flexkv.cache.tiers.running_peers import plan

    monkeypatch.setattr(plan, "usual_share", lambda config: "off")
