"""flexkv refuses a native core that was built from another version of the source. The error names both versions and the
remedy.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from build_support.ninja_file import interface_id
from flexkv import c_ext, native_core
from flexkv.errors import NativeCoreError
from flexkv.native_core import STUB

PROGRAM = """

try:
    import flexkv
except ImportError as error:
    print(type(error).__module__, type(error).__name__, error)
else:
    print("imported")
"""


def unchanged(package: Path) -> None:
    (package / STUB.name).write_bytes(STUB.read_bytes())


def another_stub(package: Path) -> None:
    (package / STUB.name).write_bytes(STUB.read_bytes() + b"\ndef newer() -> None: ...\n")


def no_stub(package: Path) -> None:
    pass


def no_core(package: Path) -> None:
    another_stub(package)
    (package / Path(c_ext.__file__).name).unlink()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Makes a copy of the package with its native core. The files are symbolic links, except the stub, which a test can
    change.
    """
    folder = tmp_path / "flexkv"
    folder.mkdir()
    for entry in [*STUB.parent.iterdir(), Path(c_ext.__file__)]:
        link = folder / entry.name
        if entry.name not in (STUB.name, "__pycache__") and not link.exists():
            link.symlink_to(entry)
    return folder


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (unchanged, "imported"),
        (another_stub, "flexkv.errors NativeCoreError"),
        (no_stub, "imported"),
        (no_core, "imported"),
    ],
)
def test_a_core_of_another_source_is_refused(
    package: Path, change: Callable[[Path], None], said: str
) -> None:
    change(package)
    # -S makes Python skip the module `site`. With `site`, an editable install would import the working tree's core
    # instead.
    command = [sys.executable, "-S", "-c", PROGRAM]
    environ = {"PYTHONPATH": str(package.parent)}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=package.parent, env=environ, timeout=60
    )
    assert done.stdout.startswith(said), done.stdout + done.stderr
    if change is another_stub:
        theirs = hashlib.sha256((package / STUB.name).read_bytes()).hexdigest()[:12]
        for part in (interface_id(), theirs, "c_ext", "`make build`"):
            assert part in done.stdout


def test_the_build_knows_the_interface() -> None:
    assert c_ext.__interface__ == interface_id()


@pytest.mark.parametrize(
    ("adapter", "name"),
    [("vllm", "FlexKVConnector"), ("sglang", "FlexKVLinker"), ("sglang", "FlexKVHiCache")],
)
def test_an_adapter_says_what_to_do_if_the_core_is_missing(
    adapter: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = import_module(f"flexkv.adapters.{adapter}")
    missing = ModuleNotFoundError("No module named 'flexkv.c_ext'", name="flexkv.c_ext")
    other = ModuleNotFoundError("No module named 'engine'", name="engine")

    def fail(error: ImportError) -> None:
        def importing(_: str) -> ModuleType:
            raise error

        monkeypatch.setattr(native_core, "import_module", importing)

    fail(missing)
    with pytest.raises(NativeCoreError, match="start from another folder"):
        getattr(package, name)
    fail(other)
    with pytest.raises(ModuleNotFoundError, match="engine"):
        getattr(package, name)
