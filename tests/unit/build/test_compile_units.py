"""Several source files are compiled together as one unit. In users' builds these are a few bindings, and in builds with
a sanitizer a dozen files.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from build_support.compile_units import ALONE, BINDINGS_TOGETHER, TOGETHER, Unit, units
from build_support.cuda_toolkit import CudaToolkit
from build_support.ninja_file import DIFFER, ROOT, SANITIZERS, NinjaFile, Variant
from build_support.preflight import compiler

SOURCES = {*(ROOT / "csrc").rglob("*.cpp"), *(ROOT / "tests" / "native").glob("*.cpp")}


def programs(variant: Variant) -> list[NinjaFile]:
    """Returns the ninja files of a variant: one for the native tests, and one for both extensions."""
    native, extensions = NinjaFile(variant), NinjaFile(variant)
    native.add_native_tests()
    extensions.add_extension("c_ext.so")
    extensions.add_testing_extension("testing_ext.so")
    return [native, extensions]


def objects(ninja: NinjaFile) -> dict[str, str]:
    """Returns the C++ file from which each object is compiled, by the object's name."""
    edges = [re.fullmatch(r"build (\S+\.o): cxx (\S+)( \| .*)?", line) for line in ninja.lines]
    return {edge[1]: edge[2] for edge in edges if edge}


def sources_of(ninja: NinjaFile) -> dict[str, tuple[Path, ...]]:
    """Returns the source files of each object, by the object's name."""
    given = objects(ninja)
    included = {name: unit.sources for name, unit in ninja.units.items()}
    return {name: included.get(file, (Path(file),)) for name, file in given.items()}


def macros_left(text: str) -> set[str]:
    """Returns the macros that are still defined after `text`. Omits macros that the text defines only if they are
    missing.
    """
    defined = set(re.findall(r"^ *# *define +(\w+)", text, re.MULTILINE))
    ended = set(re.findall(r"^ *# *undef +(\w+)", text, re.MULTILINE))
    return defined - ended - set(re.findall(r"^ *# *ifndef +(\w+)", text, re.MULTILINE))


def compile_together(folder: Path, *texts: str) -> subprocess.CompletedProcess[str]:
    sources = []
    for name, text in zip(("first.cpp", "second.cpp"), texts, strict=False):
        (folder / name).write_text(text)
        sources.append(folder / name)
    (unit,) = units(sources, folder, lambda source: "")
    (folder / "unit.cpp").write_text(unit.text(folder))
    command = [*(compiler() or "g++").split(), "-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    return subprocess.run([*command, "unit.cpp"], cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("sanitizer", [name for name in SANITIZERS if name])
def test_with_a_sanitizer_every_source_is_in_one_unit(sanitizer: str) -> None:
    found: dict[str, tuple[Path, ...]] = {}
    for ninja in programs(Variant(None, sanitizer)):
        for name, sources in sources_of(ninja).items():
            assert found.setdefault(name, sources) == sources, "one object is two things to two programs"
    times = Counter(source for sources in found.values() for source in sources)
    assert set(times) == SOURCES
    assert set(times.values()) == {1}
    for name, sources in found.items():
        assert len(sources) <= TOGETHER
        assert len({source.parent for source in sources}) == 1, name
    assert len(found) < len(SOURCES) / 4


@pytest.mark.parametrize("toolkit", [None, CudaToolkit("nvcc", "/nowhere", (13, 0))], ids=["cpu", "cuda"])
def test_what_users_run_has_one_object_for_each_file_and_for_a_few_bindings(
    toolkit: CudaToolkit | None,
) -> None:
    variant = Variant(toolkit, "")
    found: set[Path] = set()
    for ninja in programs(variant):
        for unit in ninja.units.values():
            assert 1 < len(unit.sources) <= BINDINGS_TOGETHER
            assert {source.parent.name for source in unit.sources} == {"bindings"}
            # The files with names `*_reader` convert lists of tokens and keys in the hot path. They are compiled alone,
            # with optimisation.
            assert not any(source.stem.endswith("_reader") for source in unit.sources)
        times = Counter(source for sources in sources_of(ninja).values() for source in sources)
        assert set(times.values()) == {1}
        found.update(times)
    stubs = {source for source in SOURCES if toolkit and source.name.endswith("_stub.cpp")}
    assert found == SOURCES - stubs


def test_units_are_of_equal_size_and_of_one_kind(tmp_path: Path) -> None:
    sources = [tmp_path / folder / f"{number}.cpp" for folder in "ab" for number in range(13)]
    sources += [tmp_path / "a" / "kernel.cu", tmp_path / "a" / "other.cpp"]
    found = units(sources, tmp_path, lambda source: "-O0" if source.stem == "other" else "")
    assert sorted(len(unit.sources) for unit in found) == [1, 1, 6, 6, 7, 7]
    assert {source for unit in found for source in unit.sources} == set(sources)
    assert len({unit.name(tmp_path) for unit in found}) == len(found)


def test_files_with_flags_or_macros_of_their_own_are_alone() -> None:
    assert all((ROOT / path).is_file() and reason for path, reason in ALONE.items())
    assert set(DIFFER) <= set(ALONE)
    emulating = {s for s in SOURCES if '#include "emulated_cuda.h"' in s.read_text()}
    assert emulating
    assert {source.relative_to(ROOT).as_posix() for source in emulating} <= set(ALONE)


def test_no_file_leaves_a_macro_to_the_next_one() -> None:
    left = {source.relative_to(ROOT).as_posix(): macros_left(source.read_text()) for source in SOURCES}
    assert {path: macros for path, macros in left.items() if macros and path not in ALONE} == {}


def test_control_a_macro_that_is_left_is_found() -> None:
    assert macros_left(
        "#define LEFT 1\n# define ENDED\n#undef ENDED\n#ifndef OLD\n#define OLD\n#endif\n"
    ) == {"LEFT"}


def test_names_that_clash_are_reported_with_both_files(tmp_path: Path) -> None:
    text = "namespace {\nint counts() { return 1; }\n}\nint XX() { return counts(); }\n"
    done = compile_together(tmp_path, text.replace("XX", "one"), text.replace("XX", "two"))
    assert done.returncode != 0
    assert re.search(r"second\.cpp:2:\d+: error: redefinition of .*counts", done.stderr), done.stderr
    assert re.search(r"first\.cpp:2:\d+: note: ", done.stderr), done.stderr


def test_an_error_names_the_file_in_which_it_is(tmp_path: Path) -> None:
    done = compile_together(tmp_path, "int one() { return 1; }\n", "\nint two() { return missing; }\n")
    assert done.returncode != 0
    assert re.search(r"second\.cpp:2:\d+: error: ", done.stderr), done.stderr


def test_files_that_are_clean_alone_are_clean_together(tmp_path: Path) -> None:
    hidden = (
        "namespace {\nstruct XXPart { int value = 0; };\n}\n"
        "struct XX { XXPart part; };\nXX make_XX() { return {}; }\n"
    )
    done = compile_together(tmp_path, hidden.replace("XX", "One"), hidden.replace("XX", "Two"))
    assert done.returncode == 0, done.stderr


def test_control_without_its_beginning_a_unit_is_not_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "clang" in (compiler() or ""):
        pytest.skip("GCC alone has this warning")
    monkeypatch.setattr("build_support.compile_units.BEGINNING", "")
    assert Unit((tmp_path / "a.cpp",)).text(tmp_path) == '#include "a.cpp"\n'
    with pytest.raises(AssertionError):
        test_files_that_are_clean_alone_are_clean_together(tmp_path)
