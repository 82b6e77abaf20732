"""Finds libcufile: loaded in this process, on the loader's path, or in a wheel of this environment."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path

from flexkv import c_ext

FILE_NAME = "libcufile.so.0"


@dataclass(frozen=True, slots=True)
class CufileLibrary:
    """Result of the search for libcufile.

    Attributes:
        path: empty if it was not found.
        found: "already loaded", "by the loader" or "in a wheel".
        version: such as "1.20"; empty if the library does not report it.
        reason: why it was not found: the places that were searched, each with its error.
    """

    path: str
    found: str
    version: str
    reason: str


def find_cufile() -> CufileLibrary:
    """Loads libcufile without opening its driver, and says where it was; needs no GPU."""
    if (there := _first_look()).path:
        return there
    paths = name_wheels()
    library = CufileLibrary(*c_ext.find_cufile())
    if not library.path and (said := _by_pathfinder()[1]):
        return replace(library, reason=f"{library.reason}; cuda-pathfinder: {said}")
    # cuda-pathfinder loads what it finds.
    return replace(library, found="in a wheel") if library.path in paths else library


@cache
def name_wheels() -> tuple[str, ...]:
    """Passes the paths of libcufile in wheels to the native core, once per process. The core loads one of them if
    neither the process nor the loader has the library.

    Returns:
        The paths, in the order in which they are tried; none if no wheel is needed.
    """
    if _first_look().path:
        return ()
    paths = tuple(dict.fromkeys([*_in_site_packages(), *_by_pathfinder()[0]]))
    c_ext.set_cufile_wheels(list(paths))
    return paths


@cache
def _first_look() -> CufileLibrary:
    """Checks the process and asks the loader. Only once, because a library that the loader finds
    stays in the process.
    """
    return CufileLibrary(*c_ext.find_cufile())


@cache
def _by_pathfinder() -> tuple[tuple[str, ...], str]:
    """Runs NVIDIA's own search (from the extra `gpu`), which also knows conda and CUDA_HOME.

    Returns:
        The path that it found, if any; and its error if it found none, or none that can be loaded.
    """
    try:
        pathfinder = import_module("cuda.pathfinder")
    except ImportError:
        return (), ""
    try:
        path = pathfinder.load_nvidia_dynamic_lib("cufile").abs_path
    except (
        RuntimeError,
        OSError,
    ) as error:  # not found, or found and not loaded; or the loader does not know it
        return (), " ".join(str(error).split()) or type(error).__name__
    return ((path,) if path else ()), ""


def _in_site_packages() -> list[str]:
    """The paths of libcufile in NVIDIA's wheels: in nvidia/cu13/lib, or in nvidia/cufile/lib before CUDA 13."""
    found = []
    for folder in sys.path:
        found += sorted(str(path) for path in Path(folder or ".").glob(f"nvidia/*/lib/{FILE_NAME}"))
    return found
