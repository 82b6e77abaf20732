"""Decides which source files are compiled as one unit.

The compiler spends much of its time on headers that most files of a folder include. In build variants with a sanitizer,
which are only for tests, the build therefore compiles up to `TOGETHER` files of a folder as one unit. A unit is a
generated file that includes these files. Compiler messages still show the included file. Any two files of a folder can
be in one unit, so declarations in their anonymous namespaces need different names; otherwise the compiler reports a
redefinition and names both files.

Build variants that users run have one object for each file, so that after a change only one file is compiled again.
Bindings are the exception: they are compiled in units of up to `BINDINGS_TOGETHER` files, because each file of bindings
instantiates much of pybind11.
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

TOGETHER = 12
"""Maximum number of files per unit. Larger units would save little compile time, and a change in one file would
recompile more files.
"""

BINDINGS_TOGETHER = 4
"""Maximum number of files per unit of bindings, in variants that users run. Compiling bindings in units takes two
thirds of the time of compiling each file separately.
"""

EMULATES_CUDA = "emulated_cuda.h defines words of CUDA as macros, and must come before headers that use them"

ALONE = {
    "csrc/bindings/module.cpp": "its flags name the interface, and say whether CUDA is built in",
    "csrc/cuda/device_info.cpp": "its flags say whether CUDA is built in",
    "tests/native/main.cpp": "its macro has doctest.h define main()",
    "tests/native/test_emulated_copies.cpp": EMULATES_CUDA,
    "tests/native/test_emulated_transform.cpp": EMULATES_CUDA,
}
"""Files that must not share a unit with other files, each with the reason."""

BEGINNING = """\
// Written by build_support/compile_units.py.
#if !defined(__clang__)
// GCC warns of a member whose type is in an anonymous namespace, except in the file that it was given.
#pragma GCC diagnostic ignored "-Wsubobject-linkage"
#endif
"""
"""The text with which each unit begins."""


@dataclass(frozen=True)
class Unit:
    """Source files of one folder that are compiled together."""

    sources: tuple[Path, ...]

    def name(self, root: Path) -> str:
        """Returns the unit's name. It consists of the folder below `root` and the first and last file, such as
        `csrc.layout.kv_view-to-slot_image.cpp`.
        """
        folder = self.sources[0].parent.relative_to(root).as_posix().replace("/", ".")
        return f"{folder}.{self.sources[0].stem}-to-{self.sources[-1].stem}.cpp"

    def text(self, folder: Path) -> str:
        """Returns the content of the unit's file in `folder`. The content is the same in every copy of the tree, so
        that a compiler cache recognises it.
        """
        paths = [os.path.relpath(source, folder) for source in self.sources]
        return BEGINNING + "".join(f'#include "{path}"\n' for path in paths)


def units(
    sources: Iterable[Path], root: Path, flags: Callable[[Path], str], most: int = TOGETHER
) -> list[Unit]:
    """Divides `sources`, which are below `root`, into units of at most `most` files. The files of a unit are in one
    folder and have equal `flags`. Each file in `ALONE`, and each file that is not C++, is a separate unit.
    """
    found, together = [], defaultdict(list)
    for source in sources:
        if source.suffix != ".cpp" or source.relative_to(root).as_posix() in ALONE:
            found.append(Unit((source,)))
        else:
            together[source.parent, flags(source)].append(source)
    for files in together.values():
        count = -(-len(files) // most)
        bounds = [i * len(files) // count for i in range(count + 1)]
        found += [Unit(tuple(files[begin:end])) for begin, end in itertools.pairwise(bounds)]
    return found
