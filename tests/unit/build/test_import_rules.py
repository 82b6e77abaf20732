"""Packages import each other only in the allowed directions. An engine is imported only by its adapter."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

# ALLOWED lists the packages of flexkv that each package may import besides itself. Some packages may import only a few
# modules of another one. Cache imports `transfer.graph` of transfer, and `storage.base`, `storage.tags` and
# `storage.striping` (only arithmetic) of storage. The simulation imports `remote.base` and the counts of
# `remote.plane`, which are plain types. `facts` contains what all packages use: keys of blocks and their rules
# (`facts.keys`), settings of requests (`facts.request_settings`), and what ranks and their unit tell each other
# (`facts.ranks`).
BASE = frozenset({"errors", "observe", "config", "layout", "c_ext"})
ALLOWED: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "observe": frozenset(),
    "config": frozenset({"errors", "observe", "c_ext"}),
    "layout": frozenset({"errors", "observe", "config", "c_ext"}),
    "facts": frozenset({"transfer.slab_map", "weights.files"}),
    "cache": BASE
    | {
        "facts.keys",
        "facts.request_settings",
        "transfer.graph",
        "storage.base",
        "storage.tags",
        "storage.striping",
    },
    "cache.tiers": BASE | {"cache", "facts", "transfer", "storage", "remote", "peers"},
    "transfer": BASE,
    "remote": BASE
    | {
        "facts.keys",
        "storage.base",
        "storage.group_tables",
        "storage.tags",
        "transfer.graph",
        "transfer.host_pool",
    },
    "peers": BASE | {"same_user", "storage", "transfer.graph", "transfer.host_pool"},
    "storage": BASE | {"transfer.graph", "transfer.host_pool", "transfer.slab_map"},
    "weights": frozenset({"errors", "observe", "config", "storage.private_files"}),
    "plugins": frozenset({"errors", "observe", "remote.own_program", "same_user"}),
    "unit": BASE | {"cache", "facts", "plugins", "transfer", "storage", "weights"},
    "adapters": BASE
    | {
        "native_core",
        "blend",
        "cache",
        "facts",
        "plugins",
        "same_user",
        "transfer",
        "storage",
        "unit",
        "weights",
    },
    "blend": BASE | {"cache", "facts", "transfer", "storage", "unit", "weights.files"},
    "simulation": BASE
    | {"cache", "facts", "transfer.graph", "storage.base", "storage.tags", "remote.base", "remote.plane"},
    "blend.runner": BASE | {"blend", "transfer"},
    "integration": frozenset({"adapters", "errors"}),
    "cli": BASE
    | {
        "native_core",
        "cache",
        "facts",
        "transfer",
        "storage",
        "remote",
        "peers",
        "same_user",
        "unit",
        "adapters",
        "simulation",
        "weights",
    },
}
CONTROL_PLANE = ("base", "keys", "stores", "ledger", "checks", "tiers", "moves", "promise", "manager")
"""Files and folders of `flexkv/cache`, from the lowest layer to the highest. Each entry may import only the entries
before it.
"""
ENGINES = frozenset({"vllm", "torch", "sglang", "tensorrt_llm", "transformers"})
ADAPTER_ENGINES: dict[str, frozenset[str]] = {
    "vllm": frozenset({"vllm", "torch"}),
    "sglang": frozenset({"sglang", "torch"}),
    "tensorrt_llm": frozenset({"tensorrt_llm", "torch"}),
    "torch_tensors": frozenset({"torch"}),
}
"""For each adapter, the engines that it may import. The code that adapters share (`adapters/common`) may import no
engine.
"""
TENSORS = "torch_tensors"
"""The only adapter that other adapters may import. They may import it only if they may import torch."""
BASELINES: dict[str, frozenset[str]] = {"cli/bench/torch_baseline.py": frozenset({"torch"})}
"""For each benchmark file, the modules that it may import because the benchmark compares flexkv with them."""
NAMED_BY_ENGINES = (
    "flexkv.adapters.vllm",
    "flexkv.adapters.vllm.plugin",
    "flexkv.adapters.sglang",
    "flexkv.adapters.sglang.plugin",
    "flexkv.adapters.tensorrt_llm",
    "flexkv.integration.sglang",
    "flexkv.integration.tensorrt_llm",
    "flexkv.integration.vllm.vllm_v1_adapter",
    "flexkv.common",
    "flexkv.kvmanager",
)
"""The modules that an engine imports, because its configuration or an entry point names them, or because it looks for a
package named flexkv."""
RUNNER = "blend.runner"
RUNNER_ENGINES = frozenset({"transformers", "torch"})
"""Modules that blending's runner for transformers models may import, and the rest of `blend` may not."""


def imported_modules(source: str) -> Iterator[str]:
    """Yields the absolute names of the modules that a file imports. Each name in a `from` import counts as a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def violations(
    package: str, source: str, adapter: str = "", baselines: frozenset[str] = frozenset()
) -> list[str]:
    """Returns the imported modules of a file that its package, or the adapter to which it belongs, may not import."""
    found = []
    for module in imported_modules(source):
        parts = module.split(".")
        mine = RUNNER_ENGINES if package == RUNNER else ADAPTER_ENGINES.get(adapter, frozenset())
        if parts[0] in ENGINES - mine - baselines:
            found.append(module)
        others = {adapter, "common"} | ({TENSORS} if "torch" in mine else set())
        if adapter and parts[:2] == ["flexkv", "adapters"] and not others.intersection(parts[2:3]):
            found.append(module)
        if parts[0] == "flexkv" and len(parts) > 1 and parts[1] not in (package, "__version__"):
            allowed = ALLOWED[package]
            if parts[1] not in allowed and ".".join(parts[1:3]) not in allowed:
                found.append(module)
    return found


def package_files() -> list[Path]:
    return [path for path in sorted((ROOT / "flexkv").rglob("*.py")) if path.parent != ROOT / "flexkv"]


def test_every_package_has_a_place_in_the_order() -> None:
    packages = {path.relative_to(ROOT / "flexkv").parts[0] for path in package_files()}
    assert packages <= set(ALLOWED)


@pytest.mark.parametrize("path", package_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(path: Path) -> None:
    package, *inner = path.relative_to(ROOT / "flexkv").parts
    adapter = inner[0] if package in ("adapters", "integration") and len(inner) > 1 else ""
    if (within := f"{package}.{inner[0]}") in ALLOWED:
        package = within
    baselines = BASELINES.get(path.relative_to(ROOT / "flexkv").as_posix(), frozenset())
    assert violations(package, path.read_text(), adapter, baselines) == []


def imports_upwards(room: str, source: str) -> list[str]:
    """Returns the modules of higher layers that a file in the control plane's layer `room` imports."""
    below = CONTROL_PLANE[: CONTROL_PLANE.index(room) + 1]
    rooms = {module: module.split(".")[2] for module in imported_modules(source) if module.startswith(OWN)}
    return [module for module, other in rooms.items() if other not in below]


OWN = "flexkv.cache."


def circle_in(imports: Mapping[str, Iterable[str]]) -> list[str]:
    """Returns modules that import each other in a circle, or an empty list if no modules do."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_module_imports_itself_through_others() -> None:
    """No module imports itself through other modules. Imports that only type checkers execute count too, because a
    reader of the code must follow them.
    """
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (ROOT / "flexkv").rglob("*.py")
    }
    imports: dict[str, set[str]] = {}
    for name, path in names.items():
        wanted = set(imported_modules(path.read_text()))
        # `from package import name` imports the module `package.name` if it exists, and otherwise only the package.
        imports[name] = {each if each in names else each.rpartition(".")[0] for each in wanted} & names.keys()
        imports[name] -= {name, "flexkv"}
    assert len(imports) > 200
    assert circle_in(imports) == []


def test_control_a_circle_is_found() -> None:
    assert circle_in({"a": ["b"], "b": ["c"], "c": ["a"]})
    assert circle_in({"a": ["b", "c"], "b": ["c"]}) == []


@pytest.mark.parametrize("room", CONTROL_PLANE)
def test_the_control_plane_imports_downwards(room: str) -> None:
    folder = ROOT / "flexkv" / "cache" / room
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    assert [upwards for path in files for upwards in imports_upwards(room, path.read_text())] == []


def test_every_part_of_the_control_plane_has_a_place_in_the_order() -> None:
    parts = {path.stem for path in (ROOT / "flexkv" / "cache").iterdir() if not path.name.startswith("__")}
    assert parts == set(CONTROL_PLANE)


def test_control_an_import_upwards_is_found() -> None:
    assert imports_upwards("ledger", "from flexkv.cache.tiers.contract import Tier")
    assert imports_upwards("moves", "def f():\n    from flexkv.cache.promise.lookup import Lookup")
    assert imports_upwards("promise", "from flexkv.cache.ledger.ops import OpTable") == []


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("cache", "import torch"),
        ("cache", "from flexkv.transfer.engine import x"),
        ("cache", "from flexkv.transfer import engine"),
        ("cache", "from flexkv.simulation.run import Simulation"),
        ("simulation", "from flexkv.transfer.engine import x"),
        ("config", "from flexkv.cache.base import Keys"),
        ("layout", "def f():\n    from vllm.v1 import core"),
        ("observe", "from flexkv.errors import ConfigError"),
        ("transfer", "from flexkv import cache"),
        ("blend", "import transformers"),
        (RUNNER, "from flexkv.adapters import vllm"),
        (RUNNER, "import vllm"),
    ],
)
def test_a_wrong_import_is_found(package: str, source: str) -> None:
    assert violations(package, source)


@pytest.mark.parametrize(
    ("adapter", "source"),
    [
        ("common", "import torch"),
        ("vllm", "import sglang"),
        ("sglang", "from vllm.v1 import core"),
        ("sglang", "from flexkv.adapters.vllm.worker import WorkerSide"),
        ("common", "from flexkv.adapters.sglang import linker"),
        ("common", "from flexkv.adapters.torch_tensors import device"),
    ],
)
def test_an_import_of_another_adapter_or_its_engine_is_found(adapter: str, source: str) -> None:
    assert violations("adapters", source, adapter)


def test_a_right_import_is_not() -> None:
    assert (
        violations("cache", "from flexkv.transfer.graph import OpId\nfrom flexkv.errors import ContractError")
        == []
    )
    assert violations("adapters", "import torch\nimport vllm", "vllm") == []
    assert violations(RUNNER, "import torch\nfrom flexkv.blend.plan import BlendPlan") == []
    assert violations("adapters", "from flexkv.adapters.common.framed import framed", "vllm") == []
    assert violations("adapters", "from flexkv.adapters.torch_tensors import device", "vllm") == []


def package_sources() -> dict[str, str]:
    """Returns the source of every module of flexkv, by the module's name."""
    paths = sorted((ROOT / "flexkv").rglob("*.py"))
    named = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    return {name.removesuffix(".__init__"): path.read_text() for name, path in named.items()}


@cache
def named_modules(source: str) -> tuple[str, ...]:
    """Returns the modules that a file imports, and the modules whose names it contains as strings. It imports such a
    module on first use, or runs it as a process.
    """
    strings = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    programs = [name for name in strings if isinstance(name, str) and re.fullmatch(r"flexkv(\.\w+)+", name)]
    return (*imported_modules(source), *programs, *(f"{name}.__main__" for name in programs))


def reached_modules(sources: dict[str, str], roots: tuple[str, ...]) -> set[str]:
    """Returns all modules that the roots import, directly or indirectly, and the packages that contain them."""
    reached: set[str] = set()
    waiting = list(roots)
    while waiting:
        parts = waiting.pop().split(".")
        for count in range(1, len(parts) + 1):
            module = ".".join(parts[:count])
            if module in sources and module not in reached:
                reached.add(module)
                waiting += named_modules(sources[module])
    return reached


def not_serving(page: str) -> list[str]:
    """Returns the modules and packages that, according to the page, a serving engine does not import."""
    paragraph = " ".join(page.partition("Three quarters of the Python lines")[2].partition("\n\n")[0].split())
    rest = paragraph.partition("the remaining modules:")[2]
    return [
        name.removesuffix(".py").rstrip("/").replace("/", ".")
        for name in re.findall(r"`(flexkv/[^`]+)`", rest)
    ]


def within(module: str, folders: list[str]) -> bool:
    return any(f"{module}.".startswith(f"{folder}.") for folder in folders)


def test_architecture_names_what_does_not_serve() -> None:
    """The folders and files that docs/architecture.md lists contain exactly the modules that no engine imports."""
    sources = package_sources()
    reached = reached_modules(sources, NAMED_BY_ENGINES)
    assert set(NAMED_BY_ENGINES) <= reached
    named = not_serving((ROOT / "docs" / "architecture.md").read_text())
    assert {"flexkv.simulation", "flexkv.cli", "flexkv.transfer.raw"} <= set(named)
    assert sorted(module for module in sources if within(module, named) == (module in reached)) == []
    lines = {module: source.count("\n") for module, source in sources.items()}
    share = sum(lines[module] for module in reached) / sum(lines.values())
    assert round(4 * share) == 3, f"{share:.0%} serve: docs/architecture.md says three quarters"


@pytest.mark.parametrize(
    "line",
    [
        "import flexkv.transfer.raw.gds_worker",
        "from flexkv.transfer.layerwise import store",
        "def f():\n    from flexkv.cli.bench.tables import Table",
        "PLACE = 'flexkv.simulation.run'",
    ],
)
def test_control_a_module_that_serves_is_seen_to_import_one_that_does_not(line: str) -> None:
    sources = package_sources()
    before = reached_modules(sources, NAMED_BY_ENGINES)
    sources["flexkv.unit.build"] += f"\n{line}\n"
    named = not_serving((ROOT / "docs" / "architecture.md").read_text())
    added = reached_modules(sources, NAMED_BY_ENGINES) - before
    assert any(within(module, named) for module in added)


def test_control_the_walk_follows_names_strings_and_programs() -> None:
    sources = {
        "flexkv": "",
        "flexkv.a": "from flexkv.b.c import name\nPLACES = {'x': 'flexkv.d'}\n",
        "flexkv.b": "from flexkv.e import x\n",
        "flexkv.b.c": "",
        "flexkv.d": "",
        "flexkv.d.__main__": "import flexkv.f\n",
        "flexkv.e": "",
        "flexkv.f": "",
        "flexkv.g": "import flexkv.a\n",
    }
    assert reached_modules(sources, ("flexkv.a",)) == set(sources) - {"flexkv.g"}
