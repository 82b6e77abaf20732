"""Writes and runs one ninja file per build variant.

A variant is (CUDA or not) x (sanitizer). Each has its own folder under build/, so that switching back and forth
never links a stale object.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from build_support.cuda_toolkit import CudaToolkit, select_toolkit
from build_support.ninja_progress import run_ninja
from build_support.preflight import compiler

ROOT = Path(__file__).resolve().parents[1]
SANITIZERS = {"": "", "address": "address,undefined", "thread": "thread", "undefined": "undefined"}
DEFAULT_CUDA_ARCHS = "80;90;100+PTX"


def _is_isolated() -> bool:
    """Whether pybind11 lies outside this Python's own environment."""
    import pybind11

    return not Path(pybind11.__file__).resolve().is_relative_to(Path(sys.prefix).resolve())


@dataclass(frozen=True)
class Variant:
    """What one build folder holds."""

    toolkit: CudaToolkit | None
    sanitizer: str

    @property
    def name(self) -> str:
        return f"{'cuda' if self.toolkit else 'cpu'}{'-' + self.sanitizer if self.sanitizer else ''}"

    @property
    def folder(self) -> Path:
        """Builds with headers from elsewhere, as pip's isolated ones, have one of their own: each compiles all anew,
        and would take what was compiled here with it."""
        return ROOT / "build" / (self.name + ("-wheel" if _is_isolated() else ""))

    @classmethod
    def from_environment(cls) -> Variant:
        """The variant that FLEXKV_CUDA and FLEXKV_SANITIZE ask for.

        Raises:
            ValueError: FLEXKV_SANITIZE names no known sanitizer.
        """
        sanitizer = os.environ.get("FLEXKV_SANITIZE", "")
        if sanitizer not in SANITIZERS:
            allowed = ", ".join(repr(s) for s in SANITIZERS)
            raise ValueError(f"FLEXKV_SANITIZE={sanitizer!r}: allowed are {allowed}")
        return cls(select_toolkit(os.environ.get("FLEXKV_CUDA", "auto")), sanitizer)


def warnings_are_errors() -> bool:
    """What FLEXKV_WERROR asks for; not, by default.

    Raises:
        ValueError: it is neither `1` nor `0`.
    """
    value = os.environ.get("FLEXKV_WERROR", "0")
    if value not in ("0", "1"):
        raise ValueError(f"FLEXKV_WERROR={value!r}: allowed are '1' and '0'")
    return value == "1"


def interface_id() -> str:
    """Of the interface between Python and the native core: flexkv/native_core.py compares what was built in."""
    return hashlib.sha256((ROOT / "flexkv" / "c_ext.pyi").read_bytes()).hexdigest()[:12]


def _gencode(archs: str) -> str:
    flags = []
    for arch in archs.replace(",", ";").split(";"):
        number = arch.removesuffix("+PTX")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if arch.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return " ".join(flags)


def _sources(variant: Variant) -> list[Path]:
    """Every .cpp under csrc; .cu files with a toolkit, *_stub.cpp (same symbols, no CUDA) without."""
    cpp = sorted((ROOT / "csrc").rglob("*.cpp"))
    if variant.toolkit:
        return [s for s in cpp if not s.name.endswith("_stub.cpp")] + sorted((ROOT / "csrc").rglob("*.cu"))
    return cpp


class NinjaFile:
    """Rules and targets of one variant: the extension, and the native test programs on request."""

    def __init__(self, variant: Variant) -> None:
        import pybind11

        self.variant = variant
        sanitize = SANITIZERS[variant.sanitizer]
        optimise = f"-fsanitize={sanitize} -fno-omit-frame-pointer -g1 -O1" if sanitize else "-O3 -g1"
        if "undefined" in sanitize:
            optimise += " -fno-sanitize-recover=undefined"
        cuda_define = "-DFLEXKV_WITH_CUDA=1" if variant.toolkit else "-DFLEXKV_WITH_CUDA=0"
        # Errors only where someone asks (continuous integration does): a newer compiler with new warnings must not
        # break anybody's install.
        fatal = warnings_are_errors()
        warnings = "-Wall -Wextra" + (" -Werror" if fatal else "")
        includes = (
            f"-I{ROOT}/csrc -isystem {pybind11.get_include()} -isystem {sysconfig.get_paths()['include']}"
        )
        cuda_libs = ""
        if variant.toolkit:
            home = variant.toolkit.home
            targets = sorted(Path(home, "targets").glob("*-linux"))  # x86_64-linux or sbsa-linux
            includes += "".join(f" -isystem {path}/include" for path in [*targets, home])
            libraries = [f"{path}/lib" for path in targets] + [f"{home}/lib64", f"{home}/lib"]
            cuda_libs = (
                " ".join(f"-L{path}" for path in libraries) + " -lcudart_static -Wl,--exclude-libs,ALL "
            )
        self.compiler = compiler() or "g++"
        self.link_flags = f"-fsanitize={sanitize}" if sanitize else ""
        self.libs = f"{cuda_libs}-ldl -lrt -lpthread"
        self.lines = [
            "ninja_required_version = 1.8",
            f"cxxflags = -std=c++20 {optimise} -fPIC -fvisibility=hidden {warnings} {cuda_define} {includes}",
            "rule cxx",
            f"  command = {self.compiler} -MMD -MF $out.d $cxxflags -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "  description = CXX $out",
            "rule so",
            f"  command = {self.compiler} -shared {self.link_flags} -o $out $in {self.libs}",
            "  description = LINK $out",
            "rule exe",
            f"  command = {self.compiler} {self.link_flags} -o $out $in {self.libs}",
            "  description = LINK $out",
        ]
        if variant.toolkit:
            archs = os.environ.get("FLEXKV_CUDA_ARCHS", DEFAULT_CUDA_ARCHS)
            self.lines += [
                f"nvccflags = -std=c++20 -O3 -Xcompiler -fPIC,-fvisibility=hidden,-Wall -lineinfo --threads 2 "
                f"{'-Werror all-warnings ' if fatal else ''}{_gencode(archs)} {cuda_define} -I{ROOT}/csrc",
                "rule nvcc",
                f"  command = {variant.toolkit.nvcc} -MD -MF $out.d $nvccflags -c $in -o $out",
                "  depfile = $out.d",
                "  deps = gcc",
                "  description = NVCC $out",
            ]

    def _object(self, source: Path) -> str:
        name = source.relative_to(ROOT).as_posix().replace("/", ".") + ".o"
        self.lines.append(f"build {name}: {'nvcc' if source.suffix == '.cu' else 'cxx'} {source}")
        if source.parts[-2:] == ("bindings", "module.cpp"):
            self.lines.append(f"  cxxflags = $cxxflags '-DFLEXKV_INTERFACE=\"{interface_id()}\"'")
        return name

    def add_extension(self, file_name: str) -> Path:
        """Adds the Python extension as a default target; returns where it will lie."""
        objects = [self._object(s) for s in _sources(self.variant)]
        self.lines += [f"build {file_name}: so {' '.join(objects)}", f"default {file_name}"]
        return self.variant.folder / file_name

    def add_native_tests(self) -> Path:
        """Adds one doctest program of tests/native/*.cpp over the core (without bindings)."""
        core = [s for s in _sources(self.variant) if "bindings" not in s.parts]
        tests = sorted((ROOT / "tests" / "native").glob("*.cpp"))
        objects = [self._object(s) for s in [*core, *tests]]
        self.lines += [f"build native_tests: exe {' '.join(objects)}", "default native_tests"]
        return self.variant.folder / "native_tests"

    def run(self) -> None:
        """Writes build.ninja and runs it, saying how far it is; MAX_JOBS bounds the jobs.

        Raises:
            subprocess.CalledProcessError: a compile or link step failed.
        """
        folder = self.variant.folder
        folder.mkdir(parents=True, exist_ok=True)
        ninja = shutil.which("ninja")
        command = [ninja] if ninja else [sys.executable, "-m", "ninja"]
        jobs = ["-j", os.environ["MAX_JOBS"]] if os.environ.get("MAX_JOBS") else []
        with open(folder / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two builds at once would write the same objects
            (folder / "build.ninja").write_text("\n".join([*self.lines, ""]))
            run_ninja([*command, "-C", str(folder), *jobs], f"compiling {self.variant.name}")
