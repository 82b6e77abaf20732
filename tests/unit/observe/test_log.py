"""flexkv logs through the program's handlers if it has any, and otherwise through a handler of its own."""

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


LEVELS = """
import logging, logging.config, sys
from flexkv.observe import configure_logging
program, given = sys.argv[1], sys.argv[2] == "given"
if program:  # as vLLM applies the file of VLLM_LOGGING_CONFIG_PATH
    logging.config.dictConfig({"version": 1, "loggers": {"flexkv": {"level": program}}})
configure_logging("warning", given)
first = logging.getLevelName(logging.getLogger("flexkv").level)
configure_logging("info", given)
print(first, logging.getLevelName(logging.getLogger("flexkv").level))
"""


@pytest.mark.parametrize(
    ("program", "given", "levels"),
    [
        ("DEBUG", False, "DEBUG DEBUG"),
        ("ERROR", False, "ERROR ERROR"),
        ("DEBUG", True, "WARNING INFO"),
        ("", False, "WARNING INFO"),
    ],
)
def test_a_level_of_the_programs_own_stays_unless_another_is_given(
    program: str, given: bool, levels: str
) -> None:
    """If the program has set a log level for flexkv, engines keep it unless their setting gives another level. The last
    case is the control: if the program has set none, each engine in the process sets the logger's level."""
    argv = [sys.executable, "-c", LEVELS, program, "given" if given else "default"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == levels


def test_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("flexkv.test_warn_once")
    for number in range(3):
        warn_once(logger, "test-only-key", "number %d", number)
    assert [record.message for record in caplog.records if record.name == logger.name] == ["number 0"]
