"""Tables of an engine's settings: which decide the KV of a block, where each enters its key, and which must not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flexkv.adapters.common.model_identity import plain_config


@dataclass(frozen=True, slots=True, eq=False)
class FieldTable:
    """The fields of one of an engine's configuration objects. Each field is in exactly one of the three lists.

    Attributes:
        config: class of the object.
        path: where it hangs below the engine's whole configuration, with dots; empty for that itself.
        taken: fields whose values are in the key as they are.
        elsewhere: fields that decide KV and enter the key by code of their own; by field, how.
        left_out: fields that must not change a key; by reason, their names.
        read: fields of which a part is in the key; by field, which part in words, and what makes it of the value.
    """

    config: str
    path: str
    taken: tuple[str, ...] = ()
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    read: Mapping[str, tuple[str, Callable[[Any], Any]]] = field(default_factory=dict)

    def values(self, owner: Any) -> dict[str, Any]:
        """The fields of this table's object that are taken or read, as plain values; of one that this version has not,
        that of None."""
        return {name: self.value(name, getattr(owner, name, None)) for name in (*self.taken, *self.read)}

    def value(self, name: str, value: Any) -> Any:
        """What of a field's value is in the key."""
        return self.read[name][1](value) if name in self.read else plain_config(value)

    def names(self) -> list[str]:
        """Every field of the table, once for each list that has it."""
        return [
            *self.taken,
            *self.read,
            *self.elsewhere,
            *(name for names in self.left_out.values() for name in names),
        ]

    def markdown(self) -> str:
        """Both lists of this object as rows of a table."""
        rows = [f"| `{name}` | yes | as it is |" for name in self.taken]
        rows += [f"| `{name}` | yes | {how} |" for name, (how, _) in self.read.items()]
        rows += [f"| `{name}` | yes | {how} |" for name, how in self.elsewhere.items()]
        rows += [
            f"| {', '.join(f'`{name}`' for name in names)} | no | {reason} |"
            for reason, names in self.left_out.items()
        ]
        return "\n".join(
            [f"### {self.config}", "", "| field | in the key | how, or why not |", "|---|---|---|", *rows]
        )
