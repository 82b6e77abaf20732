"""Tests of a folder in a session of their own beside the others, for a core left idle; its results are reported here.

As a plugin (`-p tests.apart --reports FILE`) it is that session's side, which writes what it reports.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from tests.beside import Beside, Command, Ended

FOLDER = Path("tests", "engines_sglang")
"""Engines that start in a minute each, and wait more than they compute."""

WAIT_S = 3000
"""For the rest of that session, which has limits of its own."""

SAID_CHARS = 4000


class Apart:
    """The other session, as one of the programs beside this one. To be closed."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._written = tempfile.TemporaryDirectory(prefix="flexkv-apart-")
        self._file = Path(self._written.name) / "reports"
        self._reports: dict[str, list[pytest.TestReport]] | None = None
        self._late = ""
        plugin = ("-p", "tests.apart", "--reports", str(self._file))
        self.command: Command = (
            "-m",
            "pytest",
            "-m",
            "not long",
            "-p",
            "no:cacheprovider",
            *plugin,
            str(FOLDER),
        )

    def reports(self, item: pytest.Item, beside: Beside) -> list[pytest.TestReport]:
        """What the other session, once it has ended, has reported of this test: failed where it did not come to it."""
        ended = self._wait(beside)
        if self._reports is None:
            self._reports = self._read()
        found = self._reports.get(item.nodeid)
        if found is None or found[-1].when != "teardown":
            said = f"{self._late}the session of its own ended with {ended.code} before this test did:\n"
            said += ended.output[-SAID_CHARS:]
            return [*(found or []), pytest.TestReport(item.nodeid, item.location, {}, "failed", said, "call")]
        return found

    def close(self) -> None:
        self._written.cleanup()

    def _wait(self, beside: Beside) -> Ended:
        try:
            return beside.ended(self.command)
        except pytest.fail.Exception as error:
            # This test's limit. What was reported until then counts; later tests find a session that has ended.
            self._late = f"{error}: "
            beside.end(self.command)
            return beside.ended(self.command)

    def _read(self) -> dict[str, list[pytest.TestReport]]:
        reports: dict[str, list[pytest.TestReport]] = {}
        text = self._file.read_text() if self._file.exists() else ""
        for line in text.splitlines(keepends=True):
            if not line.endswith("\n"):
                break  # the session died as it wrote
            report = self._config.hook.pytest_report_from_serializable(
                config=self._config, data=json.loads(line)
            )
            if isinstance(report.longrepr, list):  # where it was skipped and why; JSON has no tuples
                report.longrepr = tuple(report.longrepr)
            reports.setdefault(report.nodeid, []).append(report)
        return reports


def runs_apart(item: pytest.Item) -> bool:
    """Whether it is a test of that folder."""
    return item.config.rootpath / FOLDER in item.path.parents


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--reports", type=Path, metavar="FILE", help="appends the report of each phase of a test"
    )


def pytest_configure(config: pytest.Config) -> None:
    if (file := config.getoption("--reports", None)) is not None:
        config.pluginmanager.register(_Writer(config, file))


class _Writer:
    def __init__(self, config: pytest.Config, file: Path) -> None:
        self._config = config
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        with self._file.open("a") as file:
            file.write(json.dumps(data) + "\n")
