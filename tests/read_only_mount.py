"""Folders on file systems that are mounted read-only."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def make_read_only(mount: Path) -> None:
    """Makes the mount of a test's file system read-only, as the kernel may do after I/O errors."""
    subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)


@contextmanager
def read_only_mount(folder: Path, at: Path) -> Iterator[Path]:
    """Mounts `folder` a second time, read-only, at the new folder `at`, until the context ends. Skips the test if this
    user is not allowed to mount.
    """
    at.mkdir()
    done = subprocess.run(["mount", "--bind", str(folder), str(at)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs the right to mount a file system: {done.stderr.strip()}")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(at)], check=True)
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)
