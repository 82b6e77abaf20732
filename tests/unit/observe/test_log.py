"""Logging joins what the program has, and speaks for itself otherwise."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flexkv.observe import get_logger, warn_once

PROGRAM = """
import logging, sys
if sys.argv[1] == "own": logging.basicConfig(format="OWN %(message)s", level=logging.INFO)
from flexkv.observe import configure_logging, get_logger
configure_logging("info"); configure_logging("info")
get_logger("flexkv.cache").info("up")
get_logger("flexkv.cache").debug("hidden")
"""


@pytest.mark.parametrize(("mode", "parts"), [("own", ["OWN up"]), ("none", ["INFO", "[flexkv.cache] up"])])
def test_messages_appear_once(mode: str, parts: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert len(done.stderr.splitlines()) == 1
    assert all(part in done.stderr for part in parts)


def test_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("flexkv.test_warn_once")
    for number in range(3):
        warn_once(logger, "test-only-key", "number %d", number)
    assert [record.message for record in caplog.records if record.name == logger.name] == ["number 0"]
