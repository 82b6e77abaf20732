"""Writes and runs the ninja file of a build variant.

Variants differ in two properties: with CUDA or without, and which sanitizer, if any. The variants with and without CUDA
share a folder under build/, and all objects except a few that differ. So building both variants takes little longer
than building one. The Python bindings, which include pybind11, and the native tests, which include doctest, are each
compiled with a precompiled header. Bindings are compiled in units of several files (compile_units.py). With a
sanitizer, all other files are compiled in units, too.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from build_support import compile_units
from build_support.compile_units import Unit
from build_support.compiler_warnings import flags_for_warnings, noting_warnings
from build_support.console import say
from build_support.cuda_toolkit import CudaToolkit, find_nvcc, select_toolkit
from build_support.ninja_progress import run_ninja
from build_support.preflight import compiler, has_gpu

ROOT = Path(__file__).resolve().parents[1]
SANITIZERS = {"": "", "address": "address,undefined", "thread": "thread", "undefined": "undefined"}
DEFAULT_CUDA_ARCHS = "80;90;100+PTX"
KERNEL_FLAGS = "-std=c++20 -O3 -lineinfo -Xptxas -warn-spills"
"""Flags of nvcc. They make the compiler warn of a kernel that spills registers to memory, because spills cost
bandwidth. If warnings are errors, the build then fails.
"""


@dataclass(frozen=True)
class Variant:
    """The properties in which builds differ. `toolkit` is None for a build without CUDA; `sanitizer` is a key of
    SANITIZERS.
    """

    toolkit: CudaToolkit | None
    sanitizer: str

    @property
    def device(self) -> str:
        """The name of the folder for the objects that differ between builds with and without CUDA: `cuda` or `cpu`."""
        return "cuda" if self.toolkit else "cpu"

    @property
    def name(self) -> str:
        return f"{self.device}{'-' + self.sanitizer if self.sanitizer else ''}"

    @property
    def folder(self) -> Path:
        """The folder in which ninja runs."""
        return ROOT / "build" / (self.sanitizer or "usual")

    @classmethod
    def from_environment(cls, in_place: bool = False) -> Variant:
        """Returns the variant that FLEXKV_CUDA and FLEXKV_SANITIZE select.

        Args:
            in_place: whether the build is only for this machine. If so, and the machine has no GPU, CUDA is left out
                unless FLEXKV_CUDA is set.

        Raises:
            ValueError: FLEXKV_SANITIZE is not a known sanitizer, or FLEXKV_CUDA has a value that is not allowed.
        """
        sanitizer = os.environ.get("FLEXKV_SANITIZE", "")
        if sanitizer not in SANITIZERS:
            allowed = ", ".join(repr(s) for s in SANITIZERS)
            raise ValueError(f"FLEXKV_SANITIZE={sanitizer!r}: allowed are {allowed}")
        mode = os.environ.get("FLEXKV_CUDA")
        if mode is None and in_place and find_nvcc() is not None and not has_gpu():
            say("this machine has no NVIDIA GPU: the CUDA kernels are left out (FLEXKV_CUDA=1 compiles them)")
            mode = "0"
        return cls(select_toolkit("auto" if mode is None else mode), sanitizer)


def interface_id() -> str:
    """Returns a digest of the native core's Python interface, flexkv/c_ext.pyi. The digest is compiled into the core.
    flexkv/native_core.py compares it with the digest of the package's c_ext.pyi.
    """
    return hashlib.sha256((ROOT / "flexkv" / "c_ext.pyi").read_bytes()).hexdigest()[:12]


def _gencode(archs: str) -> str:
    flags = []
    for arch in archs.replace(",", ";").split(";"):
        number = arch.removesuffix("+PTX")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if arch.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return " ".join(flags)


HEADERS = {
    "bindings": """\
#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
""",
    "tests": """\
#include <doctest/doctest.h>

#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>
""",
}
"""The text of each precompiled header, by its name."""

DIFFER = ("csrc/cuda/device_info.cpp", "csrc/bindings/module.cpp")
"""Files whose code depends on whether the build has CUDA. All other files have one object for both variants."""

QUICKLY_COMPILED = "-O1 -g0"
"""Compiler flags for tests, and for bindings that only pass arguments on. Compiling with them takes half the time of
`-O3`."""

SANITIZED = {"address": "-Og", "thread": "-O1", "undefined": "-Og"}
"""Optimisation flags by sanitizer. At `-O1`, optimising the checks that `address` and `undefined` add takes as long as
the rest of the compilation.
"""

QUICKLY_SANITIZED = {"address": "-O0", "thread": "-O1", "undefined": "-O0"}
"""Optimisation flags of tests and bindings, by sanitizer. A sanitizer's reports about this code need only correct line
numbers, not speed."""

TESTS_SANITIZED = {"address": "-fno-sanitize=undefined"}
"""Further flags for tests, by sanitizer. Checks of undefined behaviour in a test itself would take a quarter of its
compile time; the code that it calls is checked.
"""


def _precompiled_header(source: Path, sanitizer: str) -> str:
    """Returns the name of the precompiled header with which a file is compiled quickly, `bindings` or `tests`; "" if
    the file is compiled as usual. In variants that users run, bindings that read lists of tokens or keys are compiled
    with full optimisation, because they are in the hot path.
    """
    if "bindings" in source.parts and (sanitizer or not source.stem.endswith("_reader")):
        return "bindings"
    # Two kinds of test files cannot use the header: the file that defines doctest's main must include doctest itself,
    # and the fake driver does not use doctest.
    own = source.is_relative_to(ROOT / "tests") and source != DOCTEST_MAIN and source not in FAKE_DRIVER
    return "tests" if own else ""


DOCTEST_MAIN = ROOT / "tests" / "native" / "main.cpp"
"""The file that defines doctest's `main`."""

FAKE_DRIVER = sorted((ROOT / "tests" / "native").glob("fake_cuda*.cpp"))
"""The files of the fake GPU driver, which is part of the native test program and of the tests' own extension."""

TESTING = ROOT / "csrc" / "testing"
"""Folder of code that only tests use. The code is part of the native test program and of the tests' own extension."""


def _sources(variant: Variant) -> list[Path]:
    """Returns the source files of the product. Without a CUDA toolkit, these are all .cpp files. With one, the
    *_stub.cpp files are replaced by the .cu files, which define the same symbols.
    """
    cpp = [s for s in sorted((ROOT / "csrc").rglob("*.cpp")) if not s.is_relative_to(TESTING)]
    if variant.toolkit:
        return [s for s in cpp if not s.name.endswith("_stub.cpp")] + sorted((ROOT / "csrc").rglob("*.cu"))
    return cpp


class NinjaFile:
    """The ninja rules of one variant, and the targets that the `add_` methods add: the extension, the tests' own
    extension and the native test program.
    """

    def __init__(self, variant: Variant) -> None:
        import pybind11

        self.variant = variant
        sanitize = SANITIZERS[variant.sanitizer]
        optimise = "-O3 -g1"
        if sanitize:
            optimise = f"-fsanitize={sanitize} -fno-omit-frame-pointer -g1 {SANITIZED[variant.sanitizer]}"
        if "undefined" in sanitize:
            optimise += " -fno-sanitize-recover=undefined"
        # Each of pip's isolated builds has its pybind11 in a new folder. The commands use a link with a fixed name, so
        # that they stay the same and compiled files are reused.
        self._pybind11 = (f"pybind11-{pybind11.__version__}", pybind11.get_include())
        python = f"-isystem {self._pybind11[0]} -isystem {sysconfig.get_paths()['include']}"
        cuda_libs = ""
        if variant.toolkit:
            home = variant.toolkit.home
            targets = sorted(Path(home, "targets").glob("*-linux"))  # x86_64-linux or sbsa-linux
            libraries = [f"{path}/lib" for path in targets] + [f"{home}/lib64", f"{home}/lib"]
            cuda_libs = (
                " ".join(f"-L{path}" for path in libraries) + " -lcudart_static -Wl,--exclude-libs,ALL "
            )
        self._headers: set[str] = set()
        self.units: dict[str, Unit] = {}
        self._core: list[str] = []
        self._cuda_define = f"-DFLEXKV_WITH_CUDA={int(variant.toolkit is not None)}"
        self._quickly = f" {QUICKLY_SANITIZED[variant.sanitizer] if sanitize else QUICKLY_COMPILED}"
        self.compiler = compiler() or "g++"
        self.link_flags = f"-fsanitize={sanitize}" if sanitize else ""
        self.libs = f"{cuda_libs}-ldl -lrt -lpthread"
        compile_cxx = f"{self.compiler} -MMD -MF $out.d $cxxflags $more"
        self.lines = [
            "ninja_required_version = 1.8",
            f"python = {python}",
            f"cxxflags = -std=c++20 {optimise} -fPIC -fvisibility=hidden -Wall -Wextra -I{ROOT}/csrc",
            "rule cxx",
            "  command = " + noting_warnings(f"{compile_cxx} -c $in -o $out"),
            "  depfile = $out.d",
            "  deps = gcc",
            "  description = CXX $out",
            "rule header",
            "  command = " + noting_warnings(f"{compile_cxx} -x c++-header $in -o $out"),
            "  depfile = $out.d",
            "  deps = gcc",
            "  description = HEADER $out",
            "rule so",
            f"  command = {self.compiler} -shared {self.link_flags} -o $out $in {self.libs}",
            "  description = LINK $out",
            "rule archive",
            "  command = rm -f $out && ar crsT $out $in",
            "  description = ARCHIVE $out",
            "rule exe",
            f"  command = {self.compiler} {self.link_flags} -o $out $in {self.libs}",
            "  description = LINK $out",
        ]
        if variant.toolkit:
            archs = os.environ.get("FLEXKV_CUDA_ARCHS", DEFAULT_CUDA_ARCHS)
            self.lines += [
                f"nvccflags = {KERNEL_FLAGS} -Xcompiler -fPIC,-fvisibility=hidden,-Wall "
                f"{_gencode(archs)} {self._cuda_define} -I{ROOT}/csrc",
                "rule nvcc",
                "  command = "
                + noting_warnings(
                    f"{variant.toolkit.nvcc} -MD -MF $out.d $nvccflags -c $in -o $out", "FATAL_NVCC"
                ),
                "  depfile = $out.d",
                "  deps = gcc",
                "  description = NVCC $out",
            ]

    def _objects(self, sources: list[Path]) -> list[str]:
        """Adds the objects of `sources`: one for each unit, and one for each file outside a unit. Bindings are in
        units; with a sanitizer, so are all other files.
        """
        if self.variant.sanitizer:
            units = compile_units.units(sources, ROOT, self._flags)
        else:
            bindings = [s for s in sources if _precompiled_header(s, "") == "bindings"]
            units = [Unit((s,)) for s in sources if s not in bindings]
            units += compile_units.units(bindings, ROOT, self._flags, compile_units.BINDINGS_TOGETHER)
        objects = []
        for unit in units:
            first, *others = unit.sources
            if others:
                name = unit.name(ROOT)
                self.units[name] = unit
                self.lines += [
                    f"build {name}.o: cxx {name}{self._needs(first)}",
                    f"  more ={self._flags(first)}",
                ]
                objects.append(f"{name}.o")
            else:
                objects.append(self._object(first))
        return objects

    def _object(self, source: Path) -> str:
        path = source.relative_to(ROOT).as_posix()
        name = path.replace("/", ".") + ".o"
        if source.suffix == ".cu":
            self.lines.append(f"build cuda/{name}: nvcc {source}")
            return f"cuda/{name}"
        more = self._flags(source)
        if path in DIFFER:
            more += f" {self._cuda_define}"
            name = f"{self.variant.device}/{name}"
        if path == "csrc/bindings/module.cpp":
            more += f" '-DFLEXKV_INTERFACE=\"{interface_id()}\"'"
        self.lines += [f"build {name}: cxx {source}{self._needs(source)}", f"  more ={more}"]
        return name

    def _flags(self, source: Path) -> str:
        """Returns the compiler flags of `source`. The other files of its unit have the same flags."""
        header = _precompiled_header(source, self.variant.sanitizer)
        quickly = f"{self._quickly_as(header)} -include {header}.h" if header else ""
        if source == DOCTEST_MAIN:
            quickly = self._quickly
        return f"{quickly} $python" if "bindings" in source.parts else quickly

    def _quickly_as(self, header: str) -> str:
        """Returns the flags of files that are compiled quickly with this precompiled header."""
        more = TESTS_SANITIZED.get(self.variant.sanitizer) if header == "tests" else None
        return f"{self._quickly} {more}" if more else self._quickly

    def _needs(self, source: Path) -> str:
        """Returns the part of ninja's build line for the precompiled header that `source` needs; empty if it needs
        none.
        """
        header = _precompiled_header(source, self.variant.sanitizer)
        return f" | {self._precompiled(header)}" if header else ""

    def _precompiled(self, header: str) -> str:
        """Adds the target of the precompiled header `header` if the ninja file does not have it yet, and returns the
        target's name. If a file includes `x.h` first, compilers use `x.h.gch` in its place.
        """
        target = f"{header}.h.gch"
        if header not in self._headers:
            self._headers.add(header)
            python = " $python" if header == "bindings" else ""
            self.lines += [
                f"build {target}: header {header}.h",
                f"  more ={self._quickly_as(header)}{python}",
            ]
        return target

    def add_extension(self, file_name: str) -> Path:
        """Adds the Python extension as a default target, and returns its path."""
        objects = self._core = self._objects(_sources(self.variant))
        library = f"{self.variant.device}/{file_name}"
        self.lines += [f"build {library}: so {' '.join(objects)}", f"default {library}"]
        return self.variant.folder / library

    def add_testing_extension(self, file_name: str) -> Path:
        """Adds the tests' own Python extension, from `csrc/testing`, and returns its path. `add_extension` must be
        called first.

        The tests' extension contains the fake GPU driver. It also contains its own copy of the parts of the core that
        it uses, because the product's extension hides its symbols. If both extensions bind a class, it is the same
        class in Python.
        """
        objects = self._objects([*sorted(TESTING.rglob("*.cpp")), *FAKE_DRIVER])
        core = f"{self.variant.device}/core.a"
        library = f"{self.variant.device}/{file_name}"
        self.lines += [
            f"build {core}: archive {' '.join(self._core)}",
            f"build {library}: so {' '.join(objects)} {core}",
            f"default {library}",
        ]
        return self.variant.folder / library

    def add_native_tests(self) -> Path:
        """Adds the doctest program from tests/native/*.cpp, the core and `csrc/testing` (without bindings), and
        returns its path.
        """
        core = [
            s for s in [*_sources(self.variant), *sorted(TESTING.glob("*.cpp"))] if "bindings" not in s.parts
        ]
        tests = sorted((ROOT / "tests" / "native").glob("*.cpp"))
        objects = self._objects([*core, *tests])
        program = f"{self.variant.device}/native_tests"
        self.lines += [f"build {program}: exe {' '.join(objects)}", f"default {program}"]
        return self.variant.folder / program

    def run(self) -> None:
        """Writes build.ninja and runs ninja, showing its progress; MAX_JOBS limits the number of jobs.

        Raises:
            subprocess.CalledProcessError: a compile or link step failed.
        """
        folder = self.variant.folder
        folder.mkdir(parents=True, exist_ok=True)
        jobs = ["-j", os.environ["MAX_JOBS"]] if os.environ.get("MAX_JOBS") else []
        with open(folder / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # because two builds at once would write the same objects
            for header in self._headers:
                _write_if_changed(folder / f"{header}.h", HEADERS[header])
            for file_name, unit in self.units.items():
                _write_if_changed(folder / file_name, unit.text(folder))
            name, include = self._pybind11
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(include)
            (folder / "build.ninja").write_text("\n".join([*self.lines, ""]))
            flags = flags_for_warnings(folder)
            run_ninja([*_ninja(), "-C", str(folder), *jobs], f"compiling {self.variant.name}", flags)


def _ninja() -> list[str]:
    """Returns the command of the environment's own ninja, or of the machine's ninja if the environment has none.
    Versions of ninja hash commands differently. If the returned ninja were older than the ninja of pip's isolated
    builds, everything would be recompiled after each isolated build.
    """
    if importlib.util.find_spec("ninja") is not None:
        return [sys.executable, "-m", "ninja"]
    return [shutil.which("ninja") or "ninja"]


def _write_if_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
