"""Makes a copy of the working tree whose flexkv imports a different build variant of the native core, for tests under a
sanitizer.

The copy is in the variant's build folder and consists of links. Only its folders `flexkv` and `tests` contain the
variant's extensions in place of those of the working tree. The working tree is not changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

from build_support.ninja_file import ROOT, NinjaFile, Variant
from build_support.preflight import compiler

LINKED = ("build_support", "configs", "docs", "pyproject.toml")
RUNTIMES = {"address": "libasan.so", "thread": "libtsan.so"}


def make_tree(variant: Variant) -> Path:
    """Builds the extensions of `variant` and makes the copy. Returns its folder, which can be a working directory.

    Raises:
        subprocess.CalledProcessError: the build failed.
    """
    ninja = NinjaFile(variant)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    libraries = {
        "flexkv": ninja.add_extension(f"c_ext{suffix}"),
        "tests": ninja.add_testing_extension(f"testing_ext{suffix}"),
    }
    ninja.run()
    tree = libraries["flexkv"].parent / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    for name, library in libraries.items():
        folder = tree / name
        folder.mkdir(parents=True)
        for entry in (ROOT / name).iterdir():
            if entry.suffix != ".so" and entry.name != "__pycache__":
                (folder / entry.name).symlink_to(entry)
        (folder / library.name).symlink_to(library)
    for name in LINKED:
        (tree / name).symlink_to(ROOT / name)
    return tree


def sanitizer_environment(sanitizer: str) -> dict[str, str]:
    """Returns the environment in which a Python that is not instrumented can load an extension built with
    `sanitizer`.
    """
    # The sanitizer's runtime must be loaded before everything else, and libstdc++ with it, because the runtime
    # intercepts __cxa_throw.
    program = (compiler() or "g++").split()
    libraries = [
        subprocess.run(
            [*program, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in (RUNTIMES[sanitizer], "libstdc++.so")
    ]
    return {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "LD_PRELOAD": " ".join(libraries),
        # Leaks are not reported, because Python itself leaks at exit.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        # Leaked threads are not reported, because some tests end while a thread is in a stuck copy, which the transfer
        # engine leaves behind on purpose.
        "TSAN_OPTIONS": "exitcode=66 halt_on_error=1 report_thread_leaks=0"
        f" suppressions={ROOT / 'tests' / 'sanitizers' / 'thread.supp'}",
        "PYTHONMALLOC": "malloc",
    }
