"""Finds folders of the same model whose pages have different keys. Such pages were stored with different weights or
settings, or by a version of flexkv that computes keys differently. An engine with the current keys finds none of these
pages. flexkv never deletes the folders; only a user does.
"""

from __future__ import annotations

import logging
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flexkv.storage.folder import DIGEST_DIGITS, held_bytes, is_in_use, slab_name, unit_folders

logger = logging.getLogger(__name__)

MODEL_FOLDER = re.compile(rf"(.+)-([0-9a-f]{{{DIGEST_DIGITS}}})-([0-9a-f]{{{DIGEST_DIGITS}}})")
"""The parts of a model folder's name: the model in words, digits of its fingerprint, on which keys depend, and digits
of the digest of the page formats. See `unit_folder`.
"""

MOST_NAMED = 4


@dataclass(frozen=True, slots=True)
class KeyedUnit:
    """A unit's folder, and the values in its path.

    Attributes:
        model: the model in words.
        keys: hex digits of the model's fingerprint; units with different digits have different keys.
    """

    folder: Path
    model: str
    keys: str

    @classmethod
    def of(cls, folder: Path) -> KeyedUnit | None:
        """The unit in `folder`; None if its parent folder is not named like a model's folder."""
        named = MODEL_FOLDER.fullmatch(folder.parent.name)
        return None if named is None else cls(folder, named[1], named[2])

    @property
    def name(self) -> str:
        """The unit's name in the form that `flexkv disk drop` accepts."""
        return f"{self.folder.parent.name}/{self.folder.name}"


def keyed_units(root: Path) -> list[KeyedUnit]:
    """The units under `root`, sorted by name."""
    return [unit for folder in unit_folders(root) if (unit := KeyedUnit.of(folder)) is not None]


def units_of_other_keys(own: Path) -> list[KeyedUnit]:
    """Units beside the folder `own` that have the same model and unit name but different keys, and are not in use."""
    mine = KeyedUnit.of(own)
    if mine is None:
        return []
    return [
        unit
        for unit in keyed_units(own.parent.parent)
        if (unit.model, unit.folder.name) == (mine.model, own.name)
        and unit.keys != mine.keys
        and not is_in_use(unit.folder)
    ]


def older_units(root: Path) -> list[KeyedUnit]:
    """Units that are not in use and whose keys differ from those of the newest unit with the same model and unit name.
    The newest is the one whose folder was written last.
    """
    alike: dict[tuple[str, str], list[KeyedUnit]] = defaultdict(list)
    for unit in keyed_units(root):
        alike[unit.model, unit.folder.name].append(unit)
    found = []
    for units in alike.values():
        newest = max(units, key=lambda unit: last_written(unit.folder)).keys
        found += [unit for unit in units if unit.keys != newest and not is_in_use(unit.folder)]
    return found


def last_written(folder: Path) -> float:
    """When `folder` was last written, in Unix seconds; 0 if unknown."""
    last = 0.0
    with suppress(OSError):
        for path in folder.iterdir():
            with suppress(OSError):
                last = max(last, path.lstat().st_mtime)
    return last


def describe(root: Path, units: Iterable[KeyedUnit]) -> str:
    """Returns a text with the units' names and sizes in MiB, and the command that deletes one."""
    named = list(units)
    texts = [f"{unit.name} ({held_bytes(unit.folder) >> 20} MiB)" for unit in named[:MOST_NAMED]]
    more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    return f"{', '.join(texts)}{more}; `flexkv disk drop {shlex.quote(str(root))} NAME` deletes one"


def name_other_keys(own: Path) -> None:
    """Logs which units beside the folder `own` have different keys. This is a warning if `own` has no slab yet.

    Raises:
        OSError: a folder cannot be listed.
    """
    others = units_of_other_keys(own)
    if not others:
        return
    level = logging.INFO if (own / slab_name(0)).exists() else logging.WARNING
    logger.log(
        level,
        "%s: pages of this model lie beside it under other keys (other weights or settings, or another version of "
        "flexkv made them), and this engine finds none of them: %s",
        own,
        describe(own.parent.parent, others),
    )
