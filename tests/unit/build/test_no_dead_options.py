"""Some code reads every setting, and some code records every metric."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexkv.config.model import setting_fields
from flexkv.observe import METRICS, PageLoss

PACKAGE = Path(__file__).resolve().parents[3] / "flexkv"
# Code in these files of the config package counts as reading a setting, because it derives values from several
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
    # Code reads a setting as `config.transfer.copy_threads` or `transfer.copy_threads`; methods of the section itself
    # read it as `self.copy_threads`.
    assert f"{section}.{name}" in CODE or f"self.{name}" in CODE


@pytest.mark.parametrize("name", list(METRICS))
def test_metric_is_recorded(name: str) -> None:
    code = text_outside("observe", "observe/counters.py")
    losses = [loss.name for loss in PageLoss if loss.metric == name]
    assert f'"{name}"' in code or (losses and all(f"PageLoss.{loss}" in code for loss in losses))


def test_a_dead_option_would_be_found() -> None:
    assert "host.nonsense" not in CODE
    assert '"flexkv_nonsense_total"' not in text_outside("observe")
