"""Every file in configs/ loads, and each of its lines has an effect."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from flexkv.config import load_config

FILES = sorted((Path(__file__).resolve().parents[3] / "configs").glob("*.yaml"))


def test_there_are_examples() -> None:
    assert {"laptop.yaml", "one-gpu-node.yaml", "vllm.yaml"} <= {path.name for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_line_of_an_example_takes_effect(path: Path) -> None:
    config = load_config(None, {"FLEXKV_CONFIG": str(path)})
    document = yaml.safe_load(path.read_text())
    given = [f"{section}.{name}" for section, fields in document.items() for name in fields]
    assert given
    for key in given:
        assert config.origin(key).startswith(f"file {path} line ")
