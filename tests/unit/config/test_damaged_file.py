"""If one bit of a configuration file was flipped, or its end is missing, flexkv either reads the file or refuses it
with an error that names the file.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from flexkv.config import load_config
from flexkv.config.samples import ENGINE_FILES, SAMPLES, sample_text
from flexkv.errors import ConfigError

SETTINGS = [name for name in SAMPLES if name not in ENGINE_FILES]
STEP = 8
"""The tests damage only every eighth byte, and try only every eighth length."""


def refusal(path: Path, content: bytes) -> str | None:
    """Writes these bytes to the file and loads it. Returns the message of the error, or None if there is none."""
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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("host:\n  bytes: !!timestamp foo\n", "line 2: 'foo' is no timestamp"),
        ("host:\n  bytes: !!bool foo\n", "line 2: 'foo' is no bool"),
        ('host:\n  bytes: !!int ""\n', "line 2: '' is no int"),
        ('host:\n  bytes: !!float ""\n', "line 2: ''"),
        (f"host:\n  bytes: 0x{'F' * 5000}\n", "line 2 has the value a number of thousands of digits"),
        (f"host:\n  bytes: {'[' * 3000}\n", "lists or mappings in each other"),
        ("# " + "x" * (1 << 20), "more than 1048576 bytes"),
    ],
    ids=["timestamp", "bool", "int", "float", "number", "depth", "size"],
)
def test_value_that_cannot_be_read_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "settings.yaml"
    assert said in str(refusal(path, text.encode()))
    assert str(path) in str(refusal(path, text.encode()))


def test_file_that_may_never_end_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero"), tmp_path):
        with pytest.raises(
            ConfigError, match=f"FLEXKV_CONFIG='{path}': (expected a regular file|.*directory)"
        ):
            load_config(None, {"FLEXKV_CONFIG": str(path)})
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "file").write_text("host:\n  bytes: 4GiB\n")
    assert load_config(None, {"FLEXKV_CONFIG": str(tmp_path / "link")}).host.bytes == 4 << 30
