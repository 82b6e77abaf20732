"""SGLang's test environment works on machines whose Python has its own `sitecustomize`, such as Debian's Python."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from build_support.sglang_environment import FOLDER

WITHOUT_STAND_IN = (
    "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'Torchvision' not in str(f)]\n"
)
WITHIN_S = 120


def imports_torchvision(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text("print('theirs')\n")
    return subprocess.run(
        [str(FOLDER / "bin" / "python"), "-c", program + "import torchvision; print('imported')"],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )


@pytest.mark.parametrize(("program", "can"), [("", True), (WITHOUT_STAND_IN, False)], ids=["", "control"])
def test_another_sitecustomize_hides_no_stand_in(tmp_path: Path, program: str, can: bool) -> None:
    done = imports_torchvision(program, tmp_path)
    assert done.stdout.split() == (["theirs", "imported"] if can else ["theirs"])
    assert can or "torchvision::nms" in done.stderr
