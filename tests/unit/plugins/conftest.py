"""The log of plugins."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.unit.plugins.plugin_folders import Lines


@pytest.fixture
def log() -> Iterator[Lines]:
    lines, logger = Lines(), logging.getLogger("flexkv")
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    yield lines
    logger.removeHandler(lines)
    logger.setLevel(before)
