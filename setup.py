"""Builds the native core for setuptools with a ninja file that build_support writes. Needs neither torch nor CUDA.

Environment variables: FLEXKV_CUDA=auto|1|0 (default auto; for a build in place on a machine without a GPU, 0),
FLEXKV_CUDA_ARCHS='80;90;100+PTX', FLEXKV_SANITIZE=address|thread|undefined, FLEXKV_WERROR=1 (warnings are errors),
CXX=compiler, MAX_JOBS=n.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parent))

from build_support.ninja_file import NinjaFile, Variant

TESTS = Path(__file__).resolve().parent / "tests"


class FreshModules(build_py):
    """Removes what an earlier build left under build/ before it collects the package's modules. setuptools would
    only add to that, so that a module that was renamed since would also be in the wheel under its former name.
    """

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / "flexkv", ignore_errors=True)
        super().run()


class NinjaBuild(build_ext):
    """Builds `flexkv.c_ext` under build/ and copies it to where setuptools expects it. If the build is not in
    place, the copy has no symbols for debuggers, which are four fifths of its bytes. If the build is in place and
    the tree has tests, this also builds the tests' own extension.
    """

    in_place = False

    def run(self) -> None:
        self.in_place = bool(self.inplace)  # saved, because setuptools clears `inplace` during the build
        super().run()

    def build_extension(self, ext: Extension) -> None:
        variant = Variant.from_environment(in_place=self.in_place)
        toolkit = variant.toolkit
        cuda = f"CUDA {toolkit.version[0]}.{toolkit.version[1]} at {toolkit.home}" if toolkit else "no CUDA"
        print(f"flexkv: building variant {variant.name} ({cuda})", file=sys.stderr)
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        ninja = NinjaFile(variant)
        built = {target: ninja.add_extension(target.name)}
        if self.in_place and TESTS.is_dir():
            name = self.get_ext_filename("testing_ext")
            built[TESTS / name] = ninja.add_testing_extension(name)
        ninja.run()
        for place, library in built.items():
            # copy (not copy2) gives the file a new modification time; otherwise setuptools might prefer an older file
            # of a different variant. The rename leaves the former file intact for processes that have it mapped.
            beside = place.with_name(f"new-{place.name}")
            shutil.copy(library, beside)
            beside.replace(place)
        if not self.in_place and shutil.which("strip"):
            subprocess.run(["strip", "--strip-unneeded", str(target)], check=True)


setup(
    ext_modules=[Extension("flexkv.c_ext", sources=[])],
    cmdclass={"build_ext": NinjaBuild, "build_py": FreshModules},
)
