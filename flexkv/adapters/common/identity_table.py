"""Tables of the engine settings that determine a block's KV. They also describe how each setting enters the block's
key.

`docs/identity.md` shows these tables, and lists the settings that must not change a key, each with a reason. A test
fails if an engine has a setting that is neither in the tables nor in that list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flexkv.adapters.common.model_identity import plain_config

QUANTISED = ("fp8", "float8", "int8", "fp4", "mxfp")
"""KV is quantised if the name of its dtype contains one of these words. `int8` also matches `uint8`, in which engines
may hold quantised KV."""


def is_quantised(*dtypes: object) -> bool:
    """Whether one of the names denotes a dtype of quantised KV. With quantised KV, attention backends differ in more
    than the order of summation: some also quantise the queries."""
    return any(part in str(dtype).lower() for dtype in dtypes for part in QUANTISED)


def names(text: str) -> tuple[str, ...]:
    """Splits a text into names of fields at white space."""
    return tuple(text.split())


@dataclass(frozen=True, slots=True, eq=False)
class FieldTable:
    """The fields that determine KV in one of an engine's configuration objects. Each field is in exactly one of
    `taken`, `elsewhere` and `read`.

    Attributes:
        config: class name of the configuration object.
        path: dotted path from the engine's top-level configuration to the object; empty for the top level itself.
        taken: fields whose values enter the key unchanged.
        elsewhere: fields whose values enter the key through separate code: field -> description of how.
        read: fields of which only a part enters the key: field -> (description of the part, function that extracts it).
    """

    config: str
    path: str
    taken: tuple[str, ...] = ()
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    read: Mapping[str, tuple[str, Callable[[Any], Any]]] = field(default_factory=dict)

    def values(self, owner: Any) -> dict[str, Any]:
        """Plain values of all fields in `taken` and `read`, from the configuration object `owner`. The value of a field
        that the object lacks, because the engine's version differs, is None."""
        return {name: self.value(name, getattr(owner, name, None)) for name in (*self.taken, *self.read)}

    def value(self, name: str, value: Any) -> Any:
        """The part of a field's value that enters the key."""
        return self.read[name][1](value) if name in self.read else plain_config(value)

    def names(self) -> list[str]:
        """All fields of the table. A field that is in several collections by mistake appears several times."""
        return [*self.taken, *self.read, *self.elsewhere]

    def markdown(self) -> str:
        """This table in Markdown, under its own heading."""
        rows = [f"| `{name}` | its value, unchanged |" for name in self.taken]
        rows += [f"| `{name}` | {how} |" for name, (how, _) in self.read.items()]
        rows += [f"| `{name}` | {how} |" for name, how in self.elsewhere.items()]
        return "\n".join([f"### {self.config}", "", "| field | how it enters the key |", "|---|---|", *rows])
