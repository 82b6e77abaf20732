"""Finds the folder for a node's table of weights."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from flexkv.observe import get_logger
from flexkv.storage.private_files import FOLDER_MODE, OTHERS, make_folders

logger = get_logger(__name__)

HOME_CACHE = Path("~/.cache/flexkv")
"""The folder that is used if the engine has no disk tier. It contains one folder per node, because nodes may share a
home folder.
"""

MACHINE_ID = Path("/etc/machine-id")


def table_folder(folders: Sequence[str]) -> Path | None:
    """Returns the folder for the table. It is the first of the disk tier's `folders` that exists, otherwise the node's
    folder in HOME_CACHE, otherwise a temporary folder that belongs to this user alone. None if no such folder can be
    used.
    """
    for folder in map(Path, folders):
        with suppress(OSError):  # in Python 3.11, is_dir() raises if a parent folder may not be entered
            if folder.is_dir():
                return folder
    return _in_home() or _in_temporary()


def node_name() -> str:
    """Returns a name of this node that is the same at every start and differs between nodes. It is made from the
    machine's id. If there is no id, as in many containers, it is made from the host's name.
    """
    found = ""
    with suppress(OSError):
        found = MACHINE_ID.read_text("ascii", "replace").strip()
    return hashlib.sha256(f"flexkv node {found or os.uname().nodename}".encode()).hexdigest()[:16]


def _in_home() -> Path | None:
    with suppress(OSError, RuntimeError):  # for example, this user has no home folder
        folder = HOME_CACHE.expanduser() / node_name()
        make_folders(folder)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    return None


def _in_temporary() -> Path | None:
    try:
        folder = Path(tempfile.gettempdir()) / f"flexkv-{os.geteuid()}"
        with suppress(FileExistsError):
            folder.mkdir(FOLDER_MODE)
        found = folder.lstat()
    except OSError as error:
        logger.warning("no folder for the table of weights, which are read at each start: %s", error)
        return None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & OTHERS:
        logger.warning(
            "%s is no folder of this user alone, so no table of weights is kept there: they are read at each start",
            folder,
        )
        return None
    return folder
