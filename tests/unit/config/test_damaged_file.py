"""A bit flipped in a configuration file, or its end cut off, is a configuration or an error that names the file."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from flexkv.config import load_config
from flexkv.config.samples import ENGINE_FILES, SAMPLES, sample_text
from flexkv.errors import ConfigError

SETTINGS = [name for name in SAMPLES if name not in ENGINE_FILES]
STEP = 8
"""Every eighth byte, and every eighth length."""


def refusal(path: Path, content: bytes) -> str | None:
    """The error that these bytes of a file are, or nothing."""
    path.write_bytes(content)
    try:
        load_config(None, {"FLEXKV_CONFIG": str(path)})
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", SETTINGS)
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    path, drawn = tmp_path / "settings.yaml", random.Random(name)
    whole = sample_text(name).encode()
    refusals = []
    for at in range(0, len(whole), STEP):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << drawn.randrange(8)
        refusals += [refusal(path, bytes(damaged)), refusal(path, whole[:at])]
    said = [text for text in refusals if text is not None]
    assert said
    assert [text for text in said if str(path) not in text] == []


def test_a_character_that_no_yaml_has_is_named(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_bytes(b"host:\n  bytes: 4\0GiB\n")
    with pytest.raises(ConfigError, match=r"settings\.yaml: not valid YAML: unacceptable character"):
        load_config(None, {"FLEXKV_CONFIG": str(path)})
