"""flexkv finds libcufile in each of its usual places. If it is missing, an error lists the searched places. Each test
runs a child process, because a process cannot unload a library.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from build_support.ninja_file import ROOT
from tests.unit.cuda.toolkit import FOLDER, require

FOUND = """
import json, sys
from dataclasses import asdict
sys.path[:0] = sys.argv[1:]
from flexkv.transfer import cufile_library
print(json.dumps(asdict(cufile_library.find_cufile()) | {"wheels": cufile_library.name_wheels()}))
"""
"""A program that puts the given folders in front of sys.path, and prints which libcufile flexkv finds."""

LIBRARY = """
#include <cstdint>
struct Error { int32_t code, cuda; };
extern "C" {
Error cuFileDriverOpen() { return {}; }
Error cuFileDriverClose_v2() { return {}; }
Error cuFileDriverGetProperties(void*) { return {}; }
Error cuFileHandleRegister(void**, void*) { return {}; }
void cuFileHandleDeregister(void*) {}
Error cuFileBufRegister(const void*, unsigned long, int) { return {}; }
Error cuFileBufDeregister(const void*) { return {}; }
long cuFileRead(void*, void*, unsigned long, long, long) { return 0; }
long cuFileWrite(void*, const void*, unsigned long, long, long) { return 0; }
Error cuFileGetVersion(int32_t* version) { *version = 1190; return {}; }
}
"""


def find(*folders: Path, command: tuple[str, ...] = ()) -> dict[str, object]:
    argv = [*command, sys.executable, "-c", FOUND, *map(str, folders)]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, check=True, timeout=60)
    found: dict[str, object] = json.loads(done.stdout)
    return found


def make_library(path: Path, source: str = LIBRARY) -> Path:
    path.parent.mkdir(parents=True)
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-Wl,-soname,libcufile.so.0", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True, timeout=60)
    return path


@pytest.mark.parametrize("package", ["cu13", "cufile"])
def test_a_wheel_is_found_where_the_loader_does_not_look(tmp_path: Path, package: str) -> None:
    path = make_library(tmp_path / "nvidia" / package / "lib" / "libcufile.so.0")
    found = find(tmp_path)
    assert found == {
        "path": str(path),
        "found": "in a wheel",
        "version": "1.19",
        "reason": "",
        "wheels": [str(path)],
    }


def test_what_the_loader_finds_goes_first(tmp_path: Path) -> None:
    wheel = make_library(tmp_path / "nvidia" / "cu13" / "lib" / "libcufile.so.0")
    path = make_library(tmp_path / "system" / "libcufile.so.0")
    found = find(tmp_path, command=("env", f"LD_LIBRARY_PATH={path.parent}"))
    assert (found["path"], found["found"]) == (str(path), "by the loader")
    assert str(wheel) not in str(found)


def test_cuda_pathfinder_is_asked_where_it_is_installed(tmp_path: Path) -> None:
    path = make_library(tmp_path / "conda" / "libcufile.so.0")
    package = tmp_path / "packages" / "cuda" / "pathfinder"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import ctypes\n"
        "from types import SimpleNamespace\n"
        "class DynamicLibNotFoundError(RuntimeError): pass\n"
        "def load_nvidia_dynamic_lib(name):\n"
        "    assert name == 'cufile'\n"
        f"    ctypes.CDLL({str(path)!r})\n"
        f"    return SimpleNamespace(abs_path={str(path)!r})\n"
    )
    found = find(package.parent.parent)
    assert (found["path"], found["found"], found["wheels"]) == (str(path), "in a wheel", [str(path)])
    (package / "__init__.py").write_text(
        "class DynamicLibNotFoundError(RuntimeError): pass\n"
        "def load_nvidia_dynamic_lib(name): raise DynamicLibNotFoundError(name)\n"
    )
    assert find(package.parent.parent)["path"] == ""


@pytest.mark.parametrize("kind", ["RuntimeError", "OSError"])
def test_what_cuda_pathfinder_cannot_load_is_a_reason(tmp_path: Path, kind: str) -> None:
    package = tmp_path / "cuda" / "pathfinder"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "class DynamicLibNotFoundError(RuntimeError): pass\n"
        f"def load_nvidia_dynamic_lib(name): raise {kind}('Failed to dlopen /a/libcufile.so.0:\\n bad header')\n"
    )
    found = find(tmp_path)
    assert (found["path"], found["wheels"]) == ("", [])
    assert "no wheel has it" in str(found["reason"])
    assert str(found["reason"]).endswith("; cuda-pathfinder: Failed to dlopen /a/libcufile.so.0: bad header")


def test_what_was_searched_is_said(tmp_path: Path) -> None:
    nowhere = find()
    assert nowhere["path"] == ""
    for place in ("not loaded in this process", "the loader: libcufile.so.0", "no wheel has it"):
        assert place in str(nowhere["reason"])
    broken = tmp_path / "broken" / "nvidia" / "cu13" / "lib" / "libcufile.so.0"
    broken.parent.mkdir(parents=True)
    broken.write_text("no library")
    assert f"{broken}: " in str(find(tmp_path / "broken")["reason"])
    without = LIBRARY.replace("cuFileBufRegister", "other")
    path = make_library(tmp_path / "old" / "nvidia" / "cu13" / "lib" / "libcufile.so.0", without)
    assert f"{path} lacks cuFileBufRegister" in str(find(tmp_path / "old")["reason"])


def test_the_real_library_loads_without_a_gpu() -> None:
    """The real library has all functions that flexkv looks up, and reports its version without a GPU's driver."""
    require(FOLDER / "cu13" / "lib" / "libcufile.so.0")
    found = find(FOLDER.parent)
    assert found["found"] == "in a wheel"
    assert Path(str(found["path"])).is_relative_to(FOLDER)
    assert int(str(found["version"]).split(".")[1]) >= 9
