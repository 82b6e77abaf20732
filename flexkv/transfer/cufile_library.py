"""Finds libcufile. It may already be loaded in this process, be on the loader's path, or be in an installed wheel."""

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
        path: the library's path; empty if it was not found.
        found: how the library was found: "already loaded", "by the loader" or "in a wheel"; empty if it was not found.
        version: the library's version, such as "1.20"; empty if the library does not report it.
        reason: why the library was not found: the places that were searched, each with its error. Empty if it was
            found.
    """

    path: str
    found: str
    version: str
    reason: str


def find_cufile() -> CufileLibrary:
    """Loads libcufile without opening its driver, and returns where it was found. Needs no GPU."""
    if (there := _first_look()).path:
        return there
    paths = name_wheels()
    library = CufileLibrary(*c_ext.find_cufile())
    if not library.path and (said := _by_pathfinder()[1]):
        return replace(library, reason=f"{library.reason}; cuda-pathfinder: {said}")
    # cuda-pathfinder loads the library that it finds, so the native core reports "already loaded" even for a library in
    # a wheel.
    return replace(library, found="in a wheel") if library.path in paths else library


@cache
def name_wheels() -> tuple[str, ...]:
    """Passes the paths of libcufile in installed wheels to the native core, once per process. The core loads one of
    them if the process has not loaded the library and the loader does not find it.

    Returns:
        The paths, in the order in which the core tries them; empty if no wheel is needed.
    """
    if _first_look().path:
        return ()
    paths = tuple(dict.fromkeys([*_in_site_packages(), *_by_pathfinder()[0]]))
    c_ext.set_cufile_wheels(list(paths))
    return paths


@cache
def _first_look() -> CufileLibrary:
    """Looks for libcufile in this process, then asks the loader. Only the first call searches. That search leaves the
    library loaded, so a second search would report "already loaded" even for a library that the loader found.
    """
    return CufileLibrary(*c_ext.find_cufile())


@cache
def _by_pathfinder() -> tuple[tuple[str, ...], str]:
    """Searches with NVIDIA's package cuda-pathfinder (of the extra `gpu`), which also searches conda and CUDA_HOME.

    Returns:
        The path of the library that cuda-pathfinder found and loaded, or no path; and cuda-pathfinder's error. The
        error is empty if the library was found or cuda-pathfinder is not installed.
    """
    try:
        pathfinder = import_module("cuda.pathfinder")
    except ImportError:
        return (), ""
    try:
        path = pathfinder.load_nvidia_dynamic_lib("cufile").abs_path
    except (RuntimeError, OSError) as error:
        # The library was not found or not loaded, or cuda-pathfinder has no entry for it.
        return (), " ".join(str(error).split()) or type(error).__name__
    return ((path,) if path else ()), ""


def _in_site_packages() -> list[str]:
    """Returns the paths of libcufile in NVIDIA's wheels. The wheels for CUDA 13 have it in nvidia/cu13/lib, older
    wheels in nvidia/cufile/lib.
    """
    found = []
    for folder in sys.path:
        found += sorted(str(path) for path in Path(folder or ".").glob(f"nvidia/*/lib/{FILE_NAME}"))
    return found
