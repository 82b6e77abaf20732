"""Finds the command that installs system packages on this distribution, and runs it if that is allowed."""

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
    """The package manager of one family of Linux distributions: its commands and package names.

    Attributes:
        names: maps the name of each need (`preflight.Need`) to its packages. A need that is not listed comes with the
            packages of the compiler.
    """

    program: str
    install: tuple[str, ...]
    names: dict[str, tuple[str, ...]]


# Debian has separate packages of venv and headers for each Python version. The packages `python3-*` belong to Debian's
# default version.
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
            "redis": ("redis-tools",),
            "ibverbs": ("libibverbs1",),
            "sshfs": ("sshfs", "openssh-sftp-server"),
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
            "redis": ("redis",),
            "ibverbs": ("libibverbs",),
            "sshfs": ("fuse-sshfs", "openssh-server"),
        },
    ),
)


def manager() -> PackageManager | None:
    """Returns the package manager of this machine; None if it is not one of MANAGERS."""
    return next((m for m in MANAGERS if shutil.which(m.program)), None)


def install_command(needs: list[str]) -> str | None:
    """Returns the command that installs `needs`; None if this machine has no known package manager."""
    found = manager()
    if found is None:
        return None
    return " ".join([*(() if os.geteuid() == 0 else ("sudo",)), *_install_arguments(found, needs)])


def may_install() -> bool:
    """Returns whether missing packages are installed without asking the user. This needs root, or a sudo that asks for
    no password. FLEXKV_INSTALL_SYSTEM=0 forbids it.
    """
    asked = os.environ.get("FLEXKV_INSTALL_SYSTEM", "1")
    if asked not in ("0", "1"):
        fail(f"FLEXKV_INSTALL_SYSTEM={asked!r}: allowed are '1' and '0'")
    if asked == "0" or manager() is None:
        return False
    if os.geteuid() == 0:
        return True
    if shutil.which("sudo") is None:
        return False
    done = subprocess.run([*_without_password(), "true"], stdin=subprocess.DEVNULL, capture_output=True)
    return done.returncode == 0


def install(needs: list[str]) -> bool:
    """Installs `needs`, and returns False if that failed (the output says why). Call it only if `may_install` returns
    True.
    """
    found = manager()
    assert found is not None
    say(f"installing system packages (FLEXKV_INSTALL_SYSTEM=0 declines): {install_command(needs)}")
    # `env` sets the variable, because sudo does not pass environment variables on.
    as_root = [*_without_password(), "env", "DEBIAN_FRONTEND=noninteractive"]
    if found.program == "apt-get":
        # Fetches the package lists, which a new container image lacks.
        subprocess.run([*as_root, "apt-get", "update"], stdout=subprocess.DEVNULL)
    wanted = _install_arguments(found, needs)
    return subprocess.run([*as_root, *wanted], stdout=subprocess.DEVNULL).returncode == 0


def _without_password() -> tuple[str, ...]:
    """Returns the words to put before a command so that it runs as root. If that needs a password, the command
    fails."""
    return () if os.geteuid() == 0 else ("sudo", "-n")


def _install_arguments(found: PackageManager, needs: list[str]) -> list[str]:
    """Returns the package manager's command line, with each package once."""
    packages = [package for need in needs for package in found.names.get(need, found.names["c++"])]
    return [*found.install, *dict.fromkeys(packages)]
