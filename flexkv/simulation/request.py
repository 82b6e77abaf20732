"""A request of a simulation: the steps that it wants, those that it was promised, and those that it holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from flexkv.facts.keys import Keys


@dataclass
class SimRequest:
    """A request that wants the steps of `path`, then `tail`.

    Attributes:
        arrays: per group, the keys in the form that the manager takes.
        keys: the same as bytes.
        tail_keys: per group, token count -> key of the partial tail of that many tokens.
        start, promised, computed, offered: in steps; the engine treats the computed ones (and then the tail) as done.
        blocks: per group, engine block of each page number; the tail's block comes last.
        has: per group, whether the engine believes that block to hold KV.
        unverified: loads in flight whose targets the engine uses already.
        ttl_s: seconds to live of its stored pages; None for no limit.
    """

    request_id: str
    path: tuple[int, ...]
    tail: tuple[int, ...]
    arrays: list[Keys]
    keys: list[list[bytes]]
    tail_keys: list[dict[int, bytes]]
    state: str = "new"
    start: int = 0
    promised: int = 0
    promised_tail: int = 0
    tail_loaded: int = 0
    blocks: list[list[int]] = field(default_factory=list)
    has: list[list[bool]] = field(default_factory=list)
    computed: int = 0
    offered: int = 0
    unverified: set[int] = field(default_factory=set)
    ttl_s: int | None = None

    def key_of(self, group: int, number: int) -> bytes:
        """Key of page `number`, or of the whole tail."""
        keys = self.keys[group]
        return keys[number] if number < len(keys) else self.tail_keys[group][len(self.tail)]

    @property
    def total(self) -> int:
        return len(self.path) + bool(self.tail)
