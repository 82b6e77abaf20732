"""Names of settings: aliases that come from other systems, and the messages for unknown names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flexkv.config.other_systems import other_system_hint
from flexkv.errors import ConfigError

PREFIX = "FLEXKV_"
"""Prefix of every environment variable that flexkv reads."""

TRUE_WORDS = {True, "true", "1", "yes", "on"}
FALSE_WORDS = {False, "false", "0", "no", "off"}


@dataclass(frozen=True, slots=True)
class Alias:
    """Another system's name for one of flexkv's settings.

    Attributes:
        key: the dotted key of flexkv's setting.
        translate: converts the other system's value to flexkv's. If the value is not allowed, raises a ValueError that
            says what is allowed.
        meaning: how the values correspond, for the documentation.
    """

    key: str
    translate: Callable[[object], object]
    meaning: str


def _same(value: object) -> object:
    return value


def _choice(when_true: str, when_false: str) -> Callable[[object], object]:
    def translate(value: object) -> object:
        word = value.lower() if isinstance(value, str) else value
        if isinstance(word, (bool, int, str)):
            if word in TRUE_WORDS:
                return when_true
            if word in FALSE_WORDS:
                return when_false
        raise ValueError("expected true or false")

    return translate


def _only_item(value: object) -> object:
    """Returns the only item of a list, and any other value unchanged. Other systems give one value per check layer;
    flexkv has one check layer.

    Raises:
        ValueError: the list does not have exactly one item.
    """
    if isinstance(value, (list, tuple)):
        if len(value) != 1:
            raise ValueError("expected one value: there is one check")
        return value[0]
    return value


ALIASES: dict[str, Alias] = {
    "blend_check_layers": Alias("blend.check_layer", _only_item, "the same value, or a list of one"),
    "blend_min_tokens": Alias("blend.min_tokens", _same, "the same value"),
    "blend_recompute_ratios": Alias("blend.ratio", _only_item, "the same value, or a list of one"),
    "blend_special_str": Alias("blend.separators", _same, "the same value"),
    "cpu_bytes_to_use": Alias("host.bytes", _same, "the same value"),
    "cpu_bytes_to_use_per_rank": Alias("host.bytes_per_rank", _same, "the same value"),
    "enable_blending": Alias("blend.enabled", _same, "the same value"),
    "lazy_offload": Alias("store.mode", _choice("lazy", "eager"), "true: `lazy`, false: `eager`"),
    "runtime_plugin_locations": Alias("plugins.folder", _same, "the same value, but only one folder"),
    "save_decode_cache": Alias("store.tokens", _choice("all", "prompt"), "true: `all`, false: `prompt`"),
    "save_partial_blocks": Alias("store.partial_blocks", _same, "the same value"),
    "save_unfull_chunk": Alias("store.partial_blocks", _same, "the same value"),
}


def environment_name(key: str) -> str:
    """Returns a setting's environment variable, such as FLEXKV_HOST_BYTES for "host.bytes". Returns the name of a
    variable unchanged."""
    return key if key.startswith(PREFIX) else PREFIX + key.replace(".", "_").upper()


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """Returns the allowed name that is most similar to `name`, ignoring case; None if none is similar.

    If no complete name is similar, the last part of `name` (such as "bytes") is compared with the last parts of the
    allowed names.
    """
    names = list(allowed)
    by_folded = {n.lower(): n for n in names}
    close = difflib.get_close_matches(name.lower(), by_folded, n=1, cutoff=0.6)
    if close:
        return by_folded[close[0]]
    by_last = {n.rsplit(".", 1)[-1].lower(): n for n in reversed(names)}
    close = difflib.get_close_matches(name.rsplit(".", 1)[-1].lower(), by_last, n=1, cutoff=0.75)
    return by_last[close[0]] if close else None


def unknown_setting(name: str, origin: str, allowed: Iterable[str], value: object = None) -> ConfigError:
    """Makes the error for a setting that does not exist. If another system has a setting of that name, the error hints
    at flexkv's equivalent. Otherwise it suggests the nearest name, or the command that lists all names.
    """
    names = list(allowed)
    hint = other_system_hint(name, value, str)
    if hint is None:
        near = nearest(name, names)
        hint = f"did you mean {near!r}?" if near else "no name is near it; `flexkv config show` lists all"
    given = "" if value is None else f" (value {shown(value)})"
    return ConfigError(f"unknown setting {name!r} from {origin}{given}: {hint}")


def unknown_variable(variable: str, name: str, value: str, allowed: Iterable[str]) -> str:
    """Makes the warning for an environment variable whose name looks like that of a flexkv setting, but that flexkv
    does not read.

    This is a warning, not an error, because programs share an environment, and another program's variable must not stop
    an engine.

    Args:
        name: the variable's name with the prefix spelled correctly.
    """
    # Compares names without their common prefix, because the prefix makes all names similar.
    by_rest = {name.removeprefix(PREFIX): name for name in allowed}
    hint = other_system_hint(name, value, environment_name)
    if hint is None:
        near = nearest(name.removeprefix(PREFIX), by_rest)
        hint = f"did you mean {by_rest[near]}?" if near else "`flexkv config docs` lists all variables"
    return f"environment variable {variable} is no setting of flexkv and has no effect: {hint}"


def shown(value: object) -> str:
    """Returns `value` as text for an error message: at most 120 characters, without secret parts of URLs."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to format a number with this many digits
        return "a number of thousands of digits"
    text = re.sub(r"(://[^\s,'\"?#@]*)[?#][^\s,'\"]*", r"\1?***", re.sub(r"://.*@", "://***@", text))
    return text if len(text) <= 120 else text[:117] + "..."
