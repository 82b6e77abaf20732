"""The build always uses the same ninja. Different versions of ninja hash commands differently, so each version would
recompile everything that another version has compiled.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys

import pytest

from build_support.ninja_file import _ninja


def test_the_environments_own_ninja_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert _ninja() == [sys.executable, "-m", "ninja"]


def test_without_one_the_machines_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert _ninja() == ["/usr/bin/ninja"]
