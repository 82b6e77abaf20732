"""Finds out which `flexkv` package runs. Another project installs a package of the same name. If both are installed,
Python silently imports the first one on its path.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlparse

import flexkv
from flexkv import __version__

NAME = "flexkv"


@dataclass(frozen=True, slots=True)
class OtherPackage:
    """Another installed distribution that provides a package named `flexkv`.

    Attributes:
        name, version: name and version of the distribution, as pip lists them.
        folder: the folder of its package.
    """

    name: str
    version: str
    folder: Path

    @property
    def is_this(self) -> bool:
        """Whether the distribution is this flexkv, installed a second time in another folder."""
        return self.name == NAME and self.version == __version__ and self.folder != package_folder()

    def __str__(self) -> str:
        return f"{self.name} {self.version} in {self.folder}"


def package_folder() -> Path:
    """Returns the folder from which this package was imported."""
    assert flexkv.__file__ is not None, "a package with an __init__.py has a file"
    return Path(flexkv.__file__).resolve().parent


def other_packages() -> list[OtherPackage]:
    """Returns the other distributions in this environment that provide `flexkv`, each once. Reads the metadata of all
    distributions, which takes 0.2 s for 200 of them.
    """
    names = importlib.metadata.packages_distributions().get(NAME, ())
    found = {
        OtherPackage(str(installed.metadata["Name"]), installed.version, _folder_of(installed))
        for name in dict.fromkeys(names)
        if name  # without a name, every distribution would match
        for installed in importlib.metadata.distributions(name=name)
    }
    ours = package_folder()
    mine = {package for package in found if package.folder == ours and package.version == __version__}
    return sorted(found - mine, key=str)


def name_this_package() -> Iterator[tuple[bool, str]]:
    """Yields the lines that `log_package` logs, each as (whether it is a warning, text)."""
    ours = package_folder()
    yield False, f"flexkv {__version__}, imported from {ours}"
    for other in other_packages():
        if other.is_this:
            yield (
                False,
                f"the copy of this package in {other.folder} is not used, because Python finds {ours} first",
            )
            continue
        where = "whose files lie among this one's" if other.folder == ours else "which is not used"
        yield (
            True,
            f"another package provides `flexkv` here, {where}: {other}. Keep one: `pip uninstall {other.name}`, "
            "then install the one that you mean again",
        )


def _folder_of(installed: importlib.metadata.Distribution) -> Path:
    """Returns the folder of a distribution's `flexkv`. For an editable installation, it is in the source tree."""
    try:
        origin = json.loads(installed.read_text("direct_url.json") or "{}")
    except ValueError:  # the file is damaged, but the folder can be found without it
        origin = {}
    if not isinstance(origin, dict):
        origin = {}
    url, kind = urlparse(str(origin.get("url", ""))), origin.get("dir_info")
    if url.scheme == "file" and isinstance(kind, dict) and kind.get("editable"):
        source = Path(unquote(url.path))
        return next((at for at in (source / NAME, source / "src" / NAME) if at.is_dir()), source).resolve()
    return Path(str(installed.locate_file(NAME))).resolve()
