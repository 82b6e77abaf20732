"""Every setting is read by some code, and every metric is recorded by some code."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexkv.config.model import setting_fields
from flexkv.observe import METRICS, PageLoss

PACKAGE = Path(__file__).resolve().parents[3] / "flexkv"
# These files of the config package derive values from several settings. So their code counts as code that reads
# settings.
RESOLVERS = ("config/memory.py", "config/sections.py")


def text_outside(folder: str, *but: str) -> str:
    """Returns all code of the package outside `folder`, and the code of the files `but`, which are inside it."""
    paths = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != folder]
    return "\n".join(path.read_text() for path in [*paths, *(PACKAGE / name for name in but)])


CODE = text_outside("config", *RESOLVERS)


@pytest.mark.parametrize("key", list(setting_fields()))
def test_setting_is_read(key: str) -> None:
    section, name = key.split(".")
    # Code reads a setting as `config.transfer.copy_threads` or `transfer.copy_threads`. The methods of a section read a
    # setting of the section as `self.copy_threads`.
    assert f"{section}.{name}" in CODE or f"self.{name}" in CODE


@pytest.mark.parametrize("name", list(METRICS))
def test_metric_is_recorded(name: str) -> None:
    code = text_outside("observe", "observe/counters.py")
    losses = [loss.name for loss in PageLoss if loss.metric == name]
    assert f'"{name}"' in code or (losses and all(f"PageLoss.{loss}" in code for loss in losses))


def test_a_dead_option_would_be_found() -> None:
    assert "host.nonsense" not in CODE
    assert '"flexkv_nonsense_total"' not in text_outside("observe")
