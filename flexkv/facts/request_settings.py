"""A caller's settings of the cache for one request, and their names in engines' requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeGuard

from flexkv.facts.blend_ask import FIELDS, BlendAsk

PREFIX = "flexkv."
"""Prefix of a setting's own name in a request."""

TIER_PLACES = {
    "host": ("CPU", "LOCAL"),
    "peer-host": ("CPU", "LOCAL"),
    "disk": ("STORAGE", "LOCAL"),
    "peers": ("STORAGE", "LOCAL"),
    "remote": ("STORAGE", "REMOTE"),
}
"""Each tier's label (`TierFacts.label`), and the medium and locality by which vLLM names its place."""

TIER_NAMES = tuple(TIER_PLACES)
"""What `RequestSettings.tiers` may name."""

MOST_TOKENS = 2**62
"""More than any request has."""

MOST_NAMESPACE_BYTES = 256
ALLOWED_NAMESPACE = f"text of 1 to {MOST_NAMESPACE_BYTES} bytes"

MOST_TTL_S = 2**31
"""68 years."""

WORDS = {"true": True, "false": False}


class UnreadableError(ValueError):
    """A value that a setting cannot have; the text says what is allowed."""


class Kind(NamedTuple):
    """How one setting is read.

    Attributes:
        read: makes the setting of a caller's value; raises UnreadableError.
        join: chooses between two values of a request: the one that allows less.
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
    """vLLM's `kv_load_tiers`: a tier may serve if one entry's medium and locality, where given, are its own."""
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
    """Whether callers may give a namespace this name."""
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
    """Declares a field that a request may set.

    Args:
        does, values: what it does, and its values, for the documentation.
        aliases: other names, with what reads their values.
    """
    about = {"kind": kind, "does": does, "values": values, "aliases": aliases or {}}
    return field(default=default, metadata=about)


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """The settings of one request, or of a streaming session from one piece on.

    docs/contributing/add-a-request-setting.md says how to add one, and which code heeds it.

    Attributes:
        skip_save: no further pages of the request are stored.
        skip_load: nothing is loaded for the request.
        max_store_tokens: most leading tokens of the request that are stored; None for all.
        max_load_tokens: most tokens that one load brings; None for no limit.
        tiers: names of the tiers that may serve the request, besides host memory, which always does; None for all.
        ttl_s: whole seconds after which the request's stored pages are misses; None for never.
        namespace: a further part of the namespace of the request's keys; empty for none.
        blend: how the request is blended; None for not at all.
    """

    skip_save: bool = _setting(
        False,
        FLAG,
        "nothing more of the request is stored",
        "true, false, 1, 0",
        {"skip_save": _flag, "lmcache.skip_save": _flag},
    )
    skip_load: bool = _setting(False, FLAG, "nothing is loaded for the request", "true, false, 1, 0")
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
        "no load brings more tokens, in whole blocks",
        "a whole number",
        {"max_load_tokens": TOKENS.read, "lmcache.max_tokens_per_load": TOKENS.read},
    )
    tiers: frozenset[str] | None = _setting(
        None,
        TIERS,
        "only these tiers are read for the request; host memory always is, because the others are read into it",
        f"a list of {', '.join(f'`{name}`' for name in TIER_NAMES)}; of the alias, entries `{{medium, locality}}` as "
        "vLLM has them",
        {"kv_load_tiers": _vllm_tiers},
    )
    ttl_s: int | None = _setting(
        None,
        SECONDS,
        "a page that the request stores is a miss this many seconds later, in every tier, also after a restart",
        f"a whole number from 1 to {MOST_TTL_S}",
    )
    namespace: str = _setting(
        "",
        NAMESPACE,
        "a further part of the namespace of its keys: requests with different ones share nothing, in any tier",
        ALLOWED_NAMESPACE,
    )
    blend: BlendAsk | None = _setting(  # noqa: RUF009 - the class is frozen
        None,
        BLEND,
        "segments of the prompt are reused at their positions, or the prompt is kept as a segment (vLLM alone; "
        "[blending.md](blending.md))",
        f"true, false, a mapping with {', '.join(f'`{name}`' for name in FIELDS)}",
    )


NO_SETTINGS = RequestSettings()
"""The settings of a request whose caller sets none. Compared by identity, so such a request costs nothing."""


class Setting(NamedTuple):
    """One name by which a request may give a setting.

    Attributes:
        field: the field of `RequestSettings`.
        read: makes the field's value of the caller's; raises UnreadableError.
        join: see `Kind`.
        default: what a value of None stands for.
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
"""Every name of every setting, its own first."""

OWN_NAMES = tuple(PREFIX + each.name for each in fields(RequestSettings))


def markdown_table() -> str:
    """The table of settings for the documentation."""
    rows = ["| name | other names | values | what it does |", "|---|---|---|---|"]
    for each in fields(RequestSettings):
        about = each.metadata
        others = ", ".join(f"`{name}`" for name in about["aliases"]) or "-"
        rows.append(f"| `{PREFIX}{each.name}` | {others} | {about['values']} | {about['does']} |")
    return "\n".join(rows)
