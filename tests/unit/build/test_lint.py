"""All sources pass the linters, formatters and type checks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from build_support import preflight

ROOT = Path(__file__).resolve().parents[3]
CHECKS = {
    "ruff": ["ruff", "check", "."],
    "format": ["ruff", "format", "--check", "."],
    "types": ["mypy"],
    "c++ format": ["build_support.cxx_format", "--check"],
}


@pytest.mark.timeout(900)  # mypy may run without its cache while other tests run
@pytest.mark.parametrize("name", list(CHECKS))
def test_the_tree_is_clean(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *CHECKS[name]], capture_output=True, text=True, cwd=ROOT, timeout=880
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-10_000:]


def test_the_oldest_python_is_what_is_checked_for() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    (oldest,) = re.findall(r'^requires-python = ">=3\.(\d+)"$', text, re.M)
    assert f'python_version = "3.{oldest}"' in text
    assert f'target-version = "py3{oldest}"' in text
    assert ".".join(map(str, preflight.OLDEST_PYTHON)) == f"3.{oldest}"
    (files,) = re.findall(r"^files = (.*)$", text, re.M)
    assert {"flexkv", "tests"} <= set(json.loads(files))


@pytest.mark.parametrize(
    ("name", "file", "text"),
    [
        ("ruff", "flaw.py", "import os\n"),
        ("format", "flaw.py", "x = {  'a':1 }\n"),
        ("types", "flaw.py", "def f(x: int) -> str:\n    return x\n"),
        # These samples use modules and names that the oldest supported Python does not have.
        ("types", "flaw.py", "import tomllib\n"),
        ("types", "flaw.py", "from enum import StrEnum\n"),
        ("types", "flaw.py", "from typing import Self\n"),
        ("types", "flaw.py", "from datetime import UTC\n"),
        ("types", "flaw.py", "def f() -> None:\n    raise ExceptionGroup('', [ValueError()])\n"),
        ("ruff", "flaw.py", "def f[T](x: T) -> T:\n    return x\n"),
    ],
)
def test_a_flaw_is_found(name: str, file: str, text: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text(text)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    target = [] if name != "types" else ["--config-file", "pyproject.toml", file]
    command = [sys.executable, "-m", *CHECKS[name], *target]
    environ = {**os.environ, "MYPY_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environ, timeout=280)
    assert done.returncode == 1, done.stdout + done.stderr
