"""A request of a simulation: its prompt, the steps that were promised to it, and its engine blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from flexkv.facts.keys import Keys


@dataclass
class SimRequest:
    """A request. Its prompt consists of the steps of `path`, then the partial tail `tail`.

    Attributes:
        arrays: for each group, the keys of the pages of `path`, in the form that the manager takes.
        keys: for each group, the keys in `arrays` as bytes.
        tail_keys: for each group, the keys of partial tails by number of tokens.
        state: "new", "waiting" (for its lookup), "matched" (the lookup has answered), "loading" or "running".
        start: number of leading steps that come from the engine's own cache.
        promised: number of steps after `start` that the last lookup promised.
        promised_tail, tail_loaded: number of tokens of the partial tail that the last lookup promised, and number that
            were loaded.
        blocks: for each group, the engine block of each page. The tail's block comes last.
        has: for each group and each of its `blocks`, whether the engine assumes that the block has KV.
        computed: number of leading steps that the engine treats as done. The tail counts as a step after `path`.
        offered: number of leading steps that were offered to the manager.
        unverified: ids of the request's ops of loads in flight. The engine may already use their target blocks.
        ttl_s: time to live of the request's stored pages, in seconds; None if they do not expire.
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
        """Returns the key of page `number`, or the key of the complete tail if `number` is beyond `path`."""
        keys = self.keys[group]
        return keys[number] if number < len(keys) else self.tail_keys[group][len(self.tail)]

    @property
    def total(self) -> int:
        return len(self.path) + bool(self.tail)
