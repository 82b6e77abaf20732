"""System packages by distribution: the command that installs them, and running it where that is allowed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

from build_support.console import fail, say

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
    """Whether missing packages are installed without asking: as root, or with a sudo that asks for no password.
    FLEXKV_INSTALL_SYSTEM=0 declines."""
    asked = os.environ.get("FLEXKV_INSTALL_SYSTEM", "1")
    if asked not in ("0", "1"):
        fail(f"FLEXKV_INSTALL_SYSTEM={asked!r}: allowed are '1' and '0'")
    return asked == "1" and manager() is not None and _as_root() is not None


def _as_root() -> tuple[str, ...] | None:
    """What to put before a command so that it runs as root; None where that takes a password or is not possible."""
    if os.geteuid() == 0:
        return ()
    if shutil.which("sudo") is None:
        return None
    done = subprocess.run(["sudo", "-n", "true"], stdin=subprocess.DEVNULL, capture_output=True)
    return ("sudo", "-n") if done.returncode == 0 else None


def install(needs: list[str]) -> bool:
    """Installs `needs`; False if that failed (its output says why). Only where `may_install`."""
    found, before, command = manager(), _as_root(), install_command(needs)
    assert found is not None
    assert before is not None
    assert command is not None
    say(f"installing system packages (FLEXKV_INSTALL_SYSTEM=0 declines): {command}")
    # sudo passes no variables on.
    quietly = (*before, "env", "DEBIAN_FRONTEND=noninteractive")
    if found.program == "apt-get":
        # A fresh container image has no package lists.
        subprocess.run([*quietly, "apt-get", "update"], stdout=subprocess.DEVNULL)
    wanted = command.removeprefix("sudo ").split()
    return subprocess.run([*quietly, *wanted], stdout=subprocess.DEVNULL).returncode == 0
