"""The sources pass their linters and formatters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CHECKS = {
    "ruff": ["ruff", "check", "."],
    "format": ["ruff", "format", "--check", "."],
    "types": ["mypy"],
    "c++ format": ["build_support.cxx_format", "--check"],
}


@pytest.mark.parametrize("name", list(CHECKS))
def test_clean(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *CHECKS[name]], capture_output=True, text=True, cwd=ROOT, timeout=280
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-10_000:]


@pytest.mark.parametrize(
    ("name", "file", "text"),
    [
        ("ruff", "flaw.py", "import os\n"),
        ("format", "flaw.py", "x = {  'a':1 }\n"),
        ("types", "flaw.py", "def f(x: int) -> str:\n    return x\n"),
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
