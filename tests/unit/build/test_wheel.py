"""Checks the content of a wheel, of a source archive and of an editable install."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from build_support.ninja_file import Variant
from flexkv.config.samples import SAMPLES

ROOT = Path(__file__).resolve().parents[3]
BUILD_S = 600
MOST_LIBRARY_BYTES = 8 << 20
"""The largest size of the native library in a wheel. With symbols for debuggers, it would be twice as large."""


def run(*command: str, cwd: Path = ROOT) -> str:
    environ = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environ, timeout=BUILD_S)
    assert done.returncode == 0, (done.stdout + done.stderr)[-10_000:]
    return done.stdout


@pytest.mark.timeout(2 * BUILD_S)
def test_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    # If a module was renamed after an earlier build, the build folder still has it under its old name.
    former = ROOT / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "flexkv"
    former.mkdir(parents=True, exist_ok=True)
    (former / "former_name.py").touch()
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        ".",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(tmp_path),
    )
    (wheel,) = tmp_path.glob("flexkv-*.whl")
    assert "none-any" not in wheel.name
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = {str(p.relative_to(ROOT)) for s in ("*.py", "*.pyi") for p in (ROOT / "flexkv").rglob(s)}
    (library,) = (name for name in names if name.endswith(".so"))
    samples = {f"flexkv/config/samples/{name}" for name in SAMPLES}
    assert names == sources | samples | {"flexkv/py.typed", library}

    assert zipfile.ZipFile(wheel).getinfo(library).file_size < MOST_LIBRARY_BYTES
    assert b"FaultyMover" not in zipfile.ZipFile(wheel).read(library)

    # The wheel's content must work outside the working tree.
    target = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(target)
    program = (
        "import flexkv, flexkv.c_ext as c; info = c.build_info(); "
        "from flexkv.config.samples import SAMPLES, sample_text; assert all(map(sample_text, SAMPLES)); "
        "print(flexkv.__file__, info['cpp_standard'], info['cuda'])"
    )
    environ = {**os.environ, "PYTHONPATH": str(target)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, env=environ
    )
    assert done.returncode == 0, done.stderr
    path, standard, cuda = done.stdout.split()
    assert Path(path).is_relative_to(target)
    assert int(standard) >= 202002
    # A wheel is for other machines too. So it contains everything that this machine's CUDA toolkit can compile, even if
    # this machine has no GPU.
    assert cuda == str(Variant.from_environment().toolkit is not None)


def test_source_archive_can_be_built_from(tmp_path: Path) -> None:
    run(sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", str(tmp_path))
    (archive,) = tmp_path.glob("flexkv-*.tar.gz")
    with tarfile.open(archive) as content:
        names = {name.split("/", 1)[1] for name in content.getnames() if "/" in name}
    wanted = [
        p
        for folder in ("csrc", "build_support", "flexkv/config/samples")
        for p in (ROOT / folder).rglob("*")
        if "__pycache__" not in p.parts and "testing" not in p.parts
    ]
    assert {str(p.relative_to(ROOT)) for p in wanted} <= names
    assert not [name for name in names if name.startswith("csrc/testing")]


@pytest.mark.timeout(2 * BUILD_S)
def test_editable_install_imports_the_working_tree(tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", str(environment))
    python = environment / "bin" / "python"
    # The new environment needs the packages of this environment. --system-site-packages does not provide them if this
    # environment is itself a venv.
    site = next(environment.glob("lib/python*/site-packages"))
    here = [path for path in sys.path if path.endswith("site-packages")]
    (site / "outer.pth").write_text("\n".join(here) + "\n")
    run(str(python), "-m", "pip", "install", "--no-deps", "--no-build-isolation", "-q", "-e", ".")
    program = "import flexkv.c_ext as c, flexkv.config; print(c.__file__, c.build_info()['cuda'])"
    path, cuda = run(str(python), "-c", program, cwd=tmp_path).split()
    assert Path(path).parent == ROOT / "flexkv"
    # An editable install is only for this machine: if it has no GPU, the CUDA kernels are left out.
    assert cuda == str(Variant.from_environment(in_place=True).toolkit is not None)
    assert "Commands" in run(str(environment / "bin" / "flexkv"), "--help", cwd=tmp_path)
