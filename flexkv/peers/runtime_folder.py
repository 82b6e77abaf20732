"""The runtime folder, in which the units of one user find each other, and the units' files in it."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from flexkv.errors import ConfigError
from flexkv.storage.private_files import make_folders

CARD_SUFFIX = ".json"
SOCKET_SUFFIX = ".sock"
NEW_SUFFIX = ".new"

START_S = 60.0
"""A unit writes its file at most this many seconds after it has made its socket. Older sockets without a file were left
by killed units.
"""

MOST_PATH_BYTES = 107
"""The maximum length of a Unix socket's path (`sun_path`), in bytes."""

MOST_UNITS = 256
"""The maximum number of units whose files are read from a folder."""

MOST_FACTS_BYTES = 64 << 10
"""The maximum length of a unit's file, in bytes. A longer file is not a unit's."""


def runtime_folder(setting: str | None) -> Path:
    """Returns the runtime folder, and creates it if it is missing. It is `setting` (`peers.folder`) if that is set,
    else `$XDG_RUNTIME_DIR/flexkv` if $XDG_RUNTIME_DIR itself is private to this user, else a folder in /tmp with the
    user's id in its name.

    Raises:
        ConfigError: the folder belongs to another user, other users may access it, or its path is too long for a socket
            in it.
        OSError: the folder cannot be created.
    """
    if setting:
        folder = Path(setting)
    elif (above := os.environ.get("XDG_RUNTIME_DIR")) and _is_own(Path(above)):
        folder = Path(above) / "flexkv"
    else:
        folder = Path(f"/tmp/flexkv-{os.geteuid()}")
    make_folders(folder)
    if not _is_own(folder):
        raise ConfigError(
            f"peers.folder: {folder} must be a folder of user {os.geteuid()} that nobody else may use (mode 700)"
        )
    if len(os.fsencode(socket_path(folder, "0" * 16))) > MOST_PATH_BYTES:
        raise ConfigError(
            f"peers.folder: {folder} is too long: with the socket's name it may have {MOST_PATH_BYTES} bytes"
        )
    return folder


def _is_own(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def card_path(folder: Path, unit: str) -> Path:
    return folder / (unit + CARD_SUFFIX)


def socket_path(folder: Path, unit: str) -> Path:
    return folder / (unit + SOCKET_SUFFIX)


def write_card(folder: Path, unit: str, facts: dict[str, Any]) -> None:
    """Writes a unit's file in one step, so that no reader sees a part of it.

    Raises:
        OSError: the folder cannot be written.
    """
    path = card_path(folder, unit)
    made = path.with_suffix(NEW_SUFFIX)
    try:
        made.write_text(json.dumps(facts))
        made.chmod(0o600)
        made.rename(path)
    except OSError:
        made.unlink(missing_ok=True)
        raise


def read_cards(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the id of each unit that has a file in the folder, and the facts in the file. Leaves out files of other
    users, and files that are not a unit's.
    """
    with suppress(OSError):
        names = sorted(entry.name for entry in os.scandir(folder) if entry.name.endswith(CARD_SUFFIX))
        for name in names[:MOST_UNITS]:
            with suppress(OSError, ValueError, RecursionError):
                path = folder / name
                found = path.lstat()
                is_own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
                if is_own and found.st_size <= MOST_FACTS_BYTES:
                    facts = json.loads(path.read_text())
                    if isinstance(facts, dict):
                        yield name.removesuffix(CARD_SUFFIX), facts


def remove_unit(folder: Path, unit: str) -> None:
    """Removes the files of a unit that has ended."""
    for path in (card_path(folder, unit), socket_path(folder, unit)):
        with suppress(FileNotFoundError):
            path.unlink()


def remove_strays(folder: Path) -> None:
    """Removes the sockets and unfinished files of units that were killed before they had written their files. Other
    units do not notice such leftovers, because they look for finished files only.
    """
    latest_s = time.time() - START_S
    with suppress(OSError):
        for entry in os.scandir(folder):
            name, suffix = os.path.splitext(entry.name)
            if suffix in (SOCKET_SUFFIX, NEW_SUFFIX) and not card_path(folder, name).exists():
                with suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_mtime < latest_s:
                        os.unlink(entry)
