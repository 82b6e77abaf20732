"""System packages by distribution: the command that installs them, and running it where that is allowed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

from build_support.console import say

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True)
class PackageManager:
    """How one family of distributions names and installs what we need.

    Attributes:
        names: our name of a need -> packages; a need that is not listed comes with the compiler.
    """

    program: str
    install: tuple[str, ...]
    names: dict[str, tuple[str, ...]]


# Debian keeps venv and headers apart for each Python version; `python3-*` are those of its default version.
_DEBIAN_PYTHON = (
    "python3" if os.path.realpath(sys.executable) == os.path.realpath("/usr/bin/python3") else PYTHON
)

MANAGERS = (
    PackageManager(
        "apt-get",
        ("apt-get", "install", "-y", "--no-install-recommends"),
        {
            "c++": ("g++",),
            "venv": (f"{_DEBIAN_PYTHON}-venv",),
            "python headers": (f"{_DEBIAN_PYTHON}-dev",),
            "doctest": ("doctest-dev",),
            "openssl": ("libssl-dev",),
            "numa": ("libnuma1",),
        },
    ),
    PackageManager(
        "dnf",
        ("dnf", "install", "-y"),
        {
            "c++": ("gcc-c++",),
            "python headers": ("python3-devel",),
            "doctest": ("doctest-devel",),
            "openssl": ("openssl-devel",),
            "sanitizers": ("libasan", "libubsan", "libtsan"),
            "numa": ("numactl-libs",),
        },
    ),
)


def manager() -> PackageManager | None:
    """The package manager of this machine, if it is one we know."""
    return next((m for m in MANAGERS if shutil.which(m.program)), None)


def install_command(needs: list[str]) -> str | None:
    """The command that installs `needs`, or None where we do not know it."""
    found = manager()
    if found is None:
        return None
    packages = [package for need in needs for package in found.names.get(need, found.names["c++"])]
    prefix = "" if os.geteuid() == 0 else "sudo "
    return prefix + " ".join([*found.install, *dict.fromkeys(packages)])


def may_install() -> bool:
    """True where nobody minds: as root, with apt-get, in CI or when FLEXKV_INSTALL_SYSTEM=1 asks for it."""
    asked = os.environ.get("FLEXKV_INSTALL_SYSTEM") == "1" or os.environ.get("CI") in ("true", "1")
    return asked and os.geteuid() == 0 and shutil.which("apt-get") is not None


def install(needs: list[str]) -> bool:
    """Installs `needs` with apt-get; False if that failed (its output says why)."""
    command = install_command(needs)
    assert command is not None, "may_install() comes first"
    say(f"installing system packages: {command}")
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # A fresh container image has no package lists.
    subprocess.run(["apt-get", "update"], env=environ, stdout=subprocess.DEVNULL)
    return subprocess.run(command.split(), env=environ, stdout=subprocess.DEVNULL).returncode == 0
