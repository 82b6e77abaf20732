"""Runs the demo's conversation with a real vLLM engine on a GPU. The tokens must equal those of an engine without
flexkv, and every expected hit must occur.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.needs import GPU

pytestmark = GPU
ROOT = Path(__file__).resolve().parents[2]
RUN_S = 230.0


@pytest.mark.timeout(RUN_S + 60)
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_the_demo_finds_no_other_token(tmp_path: Path, mode: str) -> None:
    platforms = pytest.importorskip("vllm.platforms", reason="vLLM is not installed")
    if not platforms.current_platform.is_cuda():
        pytest.skip("this vLLM was not built for CUDA")
    command = [sys.executable, "-m", "demo", "--model", "tiny", "--load-mode", mode, "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S)
    # The demo's exit code is 1 if a token differs or a hit is missing.
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
