"""The settings that a caller may give for one request, and the names under which engines' requests carry them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeGuard

from flexkv.facts.blend_ask import FIELDS, BlendAsk

PREFIX = "flexkv."
"""Prefix of flexkv's own names of settings in requests."""

TIER_PLACES = {
    "host": ("CPU", "LOCAL"),
    "peer-host": ("CPU", "LOCAL"),
    "disk": ("STORAGE", "LOCAL"),
    "peers": ("STORAGE", "LOCAL"),
    "remote": ("STORAGE", "REMOTE"),
}
"""Maps each tier's label (`TierFacts.label`) to the medium and locality under which vLLM's requests list it."""

TIER_NAMES = tuple(TIER_PLACES)
"""Labels that are allowed in `RequestSettings.tiers`."""

MOST_TOKENS = 2**62
"""Largest allowed number of tokens; no request has as many."""

MOST_NAMESPACE_BYTES = 256
ALLOWED_NAMESPACE = f"text of 1 to {MOST_NAMESPACE_BYTES} bytes"

MOST_TTL_S = 2**31
"""Longest allowed time to live: 68 years."""

WORDS = {"true": True, "false": False}


class UnreadableError(ValueError):
    """Raised for a value that a setting cannot have. The message says which values are allowed."""


class Kind(NamedTuple):
    """Functions that parse and combine the values of one kind of setting.

    Attributes:
        read: parses a caller's value; raises UnreadableError if it is not allowed.
        join: combines two values that one request gives. The result allows only what both values allow. Raises
            UnreadableError if the values conflict.
    """

    read: Callable[[object], Any]
    join: Callable[[Any, Any], Any]


def _flag(value: object) -> bool:
    if isinstance(value, str) and value.lower() in WORDS:
        return WORDS[value.lower()]
    if isinstance(value, (bool, int, float)) and value in (0, 1):
        return bool(value)
    raise UnreadableError("true, false, 1 or 0")


def _number(value: object, least: int, most: int) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return value
    raise UnreadableError(f"a whole number from {least} to {most}")


def _tokens(value: object) -> int:
    return _number(value, 0, MOST_TOKENS)


def _seconds(value: object) -> int:
    return _number(value, 1, MOST_TTL_S)


def _tiers(value: object) -> frozenset[str]:
    if isinstance(value, (list, tuple)) and all(
        isinstance(name, str) and name in TIER_NAMES for name in value
    ):
        return frozenset(value)
    raise UnreadableError(f"a list of {', '.join(TIER_NAMES)}")


def _vllm_tiers(value: object) -> frozenset[str]:
    """Parses vLLM's `kv_load_tiers`, a list of entries with an optional medium and locality, and returns the tiers that
    match at least one entry."""
    named: set[str] = set()
    for entry in value if isinstance(value, (list, tuple)) else [None]:
        if not isinstance(entry, Mapping) or entry.keys() - {"medium", "locality"}:
            raise UnreadableError("a list of mappings with `medium` and `locality`")
        tiers = frozenset(TIER_NAMES)
        for at, name in enumerate(("medium", "locality")):
            if (word := entry.get(name)) is None:
                continue
            known = dict.fromkeys(place[at] for place in TIER_PLACES.values())
            if not isinstance(word, str) or word.upper() not in known:
                raise UnreadableError(f"as `{name}` {' or '.join(known)}")
            tiers &= {tier for tier, place in TIER_PLACES.items() if place[at] == word.upper()}
        named |= tiers
    return frozenset(named)


def is_namespace(value: object) -> TypeGuard[str]:
    """Returns whether `value` is an allowed name of a namespace."""
    if not isinstance(value, str):
        return False
    try:
        return 0 < len(value.encode()) <= MOST_NAMESPACE_BYTES
    except UnicodeEncodeError:
        return False


def _namespace(value: object) -> str:
    if is_namespace(value):
        return value
    raise UnreadableError(ALLOWED_NAMESPACE)


def _one_namespace(one: str, other: str) -> str:
    if one != other:
        raise UnreadableError("one namespace per request")
    return one


def _blend(value: object) -> BlendAsk | None:
    try:
        return BlendAsk.read(value)
    except ValueError as error:
        raise UnreadableError(str(error)) from error


def _one_blend(one: BlendAsk, other: BlendAsk | None) -> BlendAsk | None:
    if one != other:
        raise UnreadableError("one way to blend per request")
    return one


FLAG = Kind(_flag, lambda one, other: one or other)
TOKENS = Kind(_tokens, min)
SECONDS = Kind(_seconds, min)
TIERS = Kind(_tiers, frozenset.intersection)
NAMESPACE = Kind(_namespace, _one_namespace)
BLEND = Kind(_blend, _one_blend)


def _setting(
    default: Any,
    kind: Kind,
    does: str,
    values: str,
    aliases: Mapping[str, Callable[[object], Any]] | None = None,
) -> Any:
    """Declares a field of `RequestSettings`.

    Args:
        does: what the setting does, for the documentation.
        values: the allowed values, for the documentation.
        aliases: other names of the setting in requests, each with the function that parses its value.
    """
    about = {"kind": kind, "does": does, "values": values, "aliases": aliases or {}}
    return field(default=default, metadata=about)


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """The settings of one request. In a streaming session, they are valid from the input that gives them.

    docs/contributing/add-a-request-setting.md says how to add a setting, and which code applies it.

    Attributes:
        skip_save: whether no further pages of the request are stored.
        skip_load: whether no pages are loaded for the request.
        max_store_tokens: maximum number of leading tokens of the request that are stored; None for no limit.
        max_load_tokens: maximum number of tokens that one load brings; None for no limit.
        tiers: labels of the tiers that are read for the request; None for all. Host memory is read in any case.
        ttl_s: whole seconds after which lookups no longer find the pages that the request stores; None for never.
        namespace: name that separates the request's keys from the keys of requests with another name; empty for no
            name.
        blend: the request's settings for blending; None if it is not blended.
    """

    skip_save: bool = _setting(
        False,
        FLAG,
        "no further pages of the request are stored",
        "true, false, 1, 0",
        {"skip_save": _flag, "lmcache.skip_save": _flag},
    )
    skip_load: bool = _setting(False, FLAG, "no pages are loaded for the request", "true, false, 1, 0")
    max_store_tokens: int | None = _setting(
        None,
        TOKENS,
        "no page beyond this many leading tokens of the request is stored",
        "a whole number",
        {"max_offload_tokens": TOKENS.read, "lmcache.max_offload_tokens": TOKENS.read},
    )
    max_load_tokens: int | None = _setting(
        None,
        TOKENS,
        "no load brings more tokens than this, rounded down to whole blocks",
        "a whole number",
        {"max_load_tokens": TOKENS.read, "lmcache.max_tokens_per_load": TOKENS.read},
    )
    tiers: frozenset[str] | None = _setting(
        None,
        TIERS,
        "only these tiers are read for the request, and host memory, because the others are read into it",
        f"a list of {', '.join(f'`{name}`' for name in TIER_NAMES)}; `kv_load_tiers` takes vLLM's entries "
        "`{medium, locality}`",
        {"kv_load_tiers": _vllm_tiers},
    )
    ttl_s: int | None = _setting(
        None,
        SECONDS,
        "a page that the request stores becomes a miss after this many seconds, in every tier and even after a restart",
        f"a whole number from 1 to {MOST_TTL_S}",
    )
    namespace: str = _setting(
        "",
        NAMESPACE,
        "it is added to the namespace of the request's keys: requests with different values share no page in any tier",
        ALLOWED_NAMESPACE,
    )
    blend: BlendAsk | None = _setting(  # noqa: RUF009 - the class is frozen
        None,
        BLEND,
        "cached segments are reused at their positions in the prompt, or the prompt is kept as a segment (only in "
        "vLLM; [blending.md](blending.md))",
        f"true, false, or a mapping with {', '.join(f'`{name}`' for name in FIELDS)}",
    )


NO_SETTINGS = RequestSettings()
"""The settings of a request whose caller gives none. Code compares with this object by identity, which is cheap."""


class Setting(NamedTuple):
    """One name under which a request may give a setting.

    Attributes:
        field: name of the field of `RequestSettings`.
        read: parses the caller's value; raises UnreadableError if it is not allowed.
        join: combines two values that one request gives; see `Kind`.
        default: value that the field gets if the caller's value is None.
    """

    field: str
    read: Callable[[object], Any]
    join: Callable[[Any, Any], Any]
    default: Any


def _names() -> dict[str, Setting]:
    names: dict[str, Setting] = {}
    for each in fields(RequestSettings):
        kind: Kind = each.metadata["kind"]
        readers = {PREFIX + each.name: kind.read, **each.metadata["aliases"]}
        names |= {name: Setting(each.name, read, kind.join, each.default) for name, read in readers.items()}
    return names


NAMES: dict[str, Setting] = _names()
"""All names of all settings. flexkv's own name of a setting comes before its aliases."""

OWN_NAMES = tuple(PREFIX + each.name for each in fields(RequestSettings))


def markdown_table() -> str:
    """Returns the table of settings for the documentation."""
    rows = ["| name | other names | values | what it does |", "|---|---|---|---|"]
    for each in fields(RequestSettings):
        about = each.metadata
        others = ", ".join(f"`{name}`" for name in about["aliases"]) or "-"
        rows.append(f"| `{PREFIX}{each.name}` | {others} | {about['values']} | {about['does']} |")
    return "\n".join(rows)
