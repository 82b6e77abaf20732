"""Tables of an engine's settings that decide a block's KV, and how each enters the key.

`docs/identity.md` has these tables, and the settings that must not change a key, each with its reason. A test goes
through the settings that an engine has, and fails for one that neither has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flexkv.adapters.common.model_identity import plain_config


def names(text: str) -> tuple[str, ...]:
    """The fields that a text names, separated by white space."""
    return tuple(text.split())


@dataclass(frozen=True, slots=True, eq=False)
class FieldTable:
    """The fields of one of an engine's configuration objects that decide KV. Each is in exactly one of the three
    collections.

    Attributes:
        config: the name of the object's class.
        path: dotted path from the engine's whole configuration to the object; empty for the whole configuration.
        taken: fields whose values enter the key unchanged.
        elsewhere: fields that decide KV and enter the key through separate code: field -> how, in words.
        read: fields of which a part enters the key: field -> (which part, in words; the function that extracts it).
    """

    config: str
    path: str
    taken: tuple[str, ...] = ()
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    read: Mapping[str, tuple[str, Callable[[Any], Any]]] = field(default_factory=dict)

    def values(self, owner: Any) -> dict[str, Any]:
        """The values of all fields that are taken or read, as plain values. A field that this version of the engine
        lacks counts as None."""
        return {name: self.value(name, getattr(owner, name, None)) for name in (*self.taken, *self.read)}

    def value(self, name: str, value: Any) -> Any:
        """The part of a field's value that enters the key."""
        return self.read[name][1](value) if name in self.read else plain_config(value)

    def names(self) -> list[str]:
        """Every field of the table, once for each collection that contains it."""
        return [*self.taken, *self.read, *self.elsewhere]

    def markdown(self) -> str:
        """This table in Markdown, under a heading of its own."""
        rows = [f"| `{name}` | as it is |" for name in self.taken]
        rows += [f"| `{name}` | {how} |" for name, (how, _) in self.read.items()]
        rows += [f"| `{name}` | {how} |" for name, how in self.elsewhere.items()]
        return "\n".join([f"### {self.config}", "", "| field | how it enters the key |", "|---|---|", *rows])
