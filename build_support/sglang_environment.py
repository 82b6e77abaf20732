"""Makes the environment in which the tests run the real SGLang on a CPU.

`python -m build_support.sglang_environment [FOLDER]` (default .venv-sglang) must be run by the Python that built the
native core, because the environment uses flexkv from the working tree and does not install it again. SGLang and vLLM
pin different versions of the same packages, so their environments share no packages. This module uses only the standard
library.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from build_support.console import fail, say
from build_support.environment import ROOT, Step, requirements, run_steps
from build_support.preflight import engine_name

FOLDER = ROOT / ".venv-sglang"
STAND_INS = ROOT / "build_support" / "sglang_cpu"

STEP_GIVE_UP_S = 1200.0
"""Seconds after which a step counts as hanging. A step of downloads and unpacking takes a few minutes on two cores."""

ROOM_BYTES = 6 << 30
"""Free bytes that the disk must have. The environment takes 3 GB, and pip unpacks packages on the same disk."""

HINT = """\
SGLang's wheels cannot be had here, so the tests with the real SGLang will fail. Let pip reach an index that has them
(pip.conf, PIP_INDEX_URL), take a Python that they are built for (make PYTHON=python3.11), or run the other tests:
make test-unit test-native test-engines."""


def plan() -> list[Step]:
    """Returns the steps, in order. SGLang itself is installed without its dependencies, which need a GPU."""
    return [
        requirements("sglang-torch", hint=HINT),
        requirements("sglang-minimal", hint=HINT),
        requirements("sglang-no-deps", "--no-deps", hint=HINT),
        requirements("mooncake", "--no-deps"),
    ]


def make(folder: Path) -> None:
    """Makes the environment in `folder`, or brings it up to date. Returns at once if nothing changed, and ends the
    program after a failure.
    """
    parent = folder.parent
    if not folder.exists() and shutil.disk_usage(parent).free < ROOM_BYTES:
        free = shutil.disk_usage(parent).free >> 20
        fail(f"{parent} has {free} MiB free; the environment of SGLang's tests needs {ROOM_BYTES >> 20}")
    for _ in run_steps(folder, plan(), STEP_GIVE_UP_S):
        pass
    _link_working_tree(folder)


def _link_working_tree(folder: Path) -> None:
    """Makes this working tree, the CPU replacements of GPU code, and flexkv's entry points visible to the environment's
    Python.
    """
    python = folder / "bin" / "python"
    program = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    done = subprocess.run([str(python), "-c", program], capture_output=True, text=True, check=True)
    site = Path(done.stdout.strip())
    (site / "flexkv-working-tree.pth").write_text(f"{ROOT}\n{STAND_INS}\nimport torchvision_operators\n")
    # Installs only flexkv's metadata, because an editable install would rebuild the native core with this environment's
    # paths.
    command = [str(python), "setup.py", "-q", "dist_info", "--output-dir", str(site)]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if told.returncode != 0:
        fail(f"no entry points for {folder}: {told.stderr.strip()[-600:]}")


def main() -> None:
    if engine_name() == "none":
        say("FLEXKV_ENGINE=none: no environment for SGLang; its tests will fail")
        return
    make(Path(sys.argv[1] if len(sys.argv) > 1 else FOLDER).resolve())


if __name__ == "__main__":
    main()
