"""Lists the names of vLLM that flexkv's adapter uses, from its source, and those that an installed vLLM lacks.

vLLM's connector interface is experimental and its engine's classes are nobody's interface, so a new version may drop
any of them. Three kinds are found: imported names, attributes that are read from arguments annotated with a class of
vLLM, and the names in `BY_HAND`, whose origin no annotation shows.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from flexkv.adapters.vllm.engine_checks import TESTED_VERSIONS

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("flexkv/adapters/vllm", "flexkv/integration")

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"

BY_HAND = frozenset(
    {
        "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory._registry",
        "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory.register_connector",
        "vllm.multimodal.hasher:MultiModalHasher.hash_kwargs",
        "vllm.config:ModelConfig.enable_sleep_mode",
        "vllm.v1.attention.backends.cpu_attn:_get_attn_isa",
        *(
            f"vllm.v1.request:Request.{name}"
            for name in (
                "num_computed_tokens",
                "num_in_flight_tokens",
                "num_output_placeholders",
                "num_prompt_tokens",
                "num_tokens",
                "shared_prefix_boundary",
                "status",
            )
        ),
        *(
            f"vllm.v1.core.block_pool:BlockPool.{name}"
            for name in (
                "_reuse_watchers",
                "blocks",
                "free_block_queue",
                "get_cached_block",
                "touch",
                "unpin_blocks",
            )
        ),
        *(
            f"vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.{name}"
            for name in ("fake_free_list_head", "iter_blocks_after", "num_free_blocks")
        ),
        f"{BASE}:KVConnectorBase_V1._get_connector_metadata",
        f"{BASE}:KVConnectorBase_V1.unregister_kv_caches",
        f"{BASE}:KVConnectorBase_V1.restore_kv_caches",
        f"{BASE}:KVConnectorBase_V1.supports_sleep_mode",
    }
)
"""Private names, and hooks that the adapter looks for before it uses them."""

FILLED_BY_US = frozenset(
    f"{BASE}:{name}"
    for name in ("KVConnectorMetadata", "KVConnectorWorkerMetadata", "KVConnectorHandshakeMetadata")
)
"""Classes that vLLM carries for a connector: their objects are of the adapter's own classes."""

ADDED = {
    "0.33": frozenset(
        f"{BASE}:KVConnectorBase_V1.{hook}"
        for hook in ("unregister_kv_caches", "restore_kv_caches", "supports_sleep_mode")
    )
}
"""Names that are new in a version, and without which the adapter works in earlier versions."""


def absent_in(version: str) -> frozenset[str]:
    """Names that the adapter expects this version to lack."""
    later = TESTED_VERSIONS[TESTED_VERSIONS.index(version) + 1 :]
    return frozenset().union(*(ADDED.get(one, frozenset()) for one in later))


def touched() -> list[str]:
    """Every name, as "module:Class.attribute" or "module:name", sorted."""
    found = set(BY_HAND)
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            found.update(_names_in(ast.parse(path.read_text(encoding="utf-8"))))
    return sorted(found)


def _names_in(tree: ast.Module) -> Iterator[str]:
    classes: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
            for alias in node.names:
                classes[alias.asname or alias.name] = f"{node.module}:{alias.name}"
    yield from classes.values()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield from _attributes_in(node, classes)


def _attributes_in(function: ast.FunctionDef, classes: dict[str, str]) -> Iterator[str]:
    """Attributes that one function reads from arguments annotated with imported classes of vLLM."""
    arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    kinds = {}
    for argument in arguments:
        kind = classes.get(ast.unparse(argument.annotation)) if argument.annotation else None
        if kind is not None and kind not in FILLED_BY_US:
            kinds[argument.arg] = kind
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in kinds:
            yield f"{kinds[node.value.id]}.{node.attr}"


def missing(names: Iterable[str]) -> list[str]:
    """The names that the vLLM on this process's path lacks."""
    return [name for name in names if not _exists(name)]


def _exists(name: str) -> bool:
    module, _, path = name.partition(":")
    try:
        target: Any = importlib.import_module(module)
    except ImportError:
        return False
    first, *attributes = path.split(".")
    if not hasattr(target, first):
        try:
            importlib.import_module(f"{module}.{first}")
        except ImportError:
            return False
        return not attributes
    target = getattr(target, first)
    return all(_has_attribute(target, attribute) for attribute in attributes)


def _has_attribute(owner: Any, name: str) -> bool:
    """Whether objects of the class, or of a derived one, have the name: defined, annotated, or set by a method."""
    if hasattr(owner, name):
        return True
    for base in inspect.getmro(owner) if inspect.isclass(owner) else ():
        if name in getattr(base, "__annotations__", {}):
            return True
        if base is not object and base.__module__.startswith("vllm"):
            source = inspect.getsource(base)
            if re.search(rf"\bself\.{name}\b[^=\n]*=(?!=)", source) or re.search(rf'"{name}"', source):
                return True
    kinds = owner.__subclasses__() if inspect.isclass(owner) else ()
    return any(_has_attribute(kind, name) for kind in kinds if kind.__module__.startswith("vllm"))


def markdown() -> str:
    """A table of the names by module, and which of the versions that flexkv was tested with have them."""
    modules: dict[str, list[str]] = {}
    for name in touched():
        module, _, path = name.partition(":")
        modules.setdefault(module, []).append(path)
    lines = [
        f"| module | name | {' | '.join(TESTED_VERSIONS)} |",
        f"|---|---|{'---|' * len(TESTED_VERSIONS)}",
    ]
    for module, paths in sorted(modules.items()):
        groups: dict[tuple[str, ...], list[str]] = {}
        for path in paths:
            there = tuple("no" if f"{module}:{path}" in absent_in(one) else "yes" for one in TESTED_VERSIONS)
            groups.setdefault(there, []).append(path)
        for there, names in sorted(groups.items(), reverse=True):
            shown = ", ".join(f"`{name}`" for name in names)
            lines.append(f"| `{module}` | {shown} | {' | '.join(there)} |")
    return "\n".join(lines)
