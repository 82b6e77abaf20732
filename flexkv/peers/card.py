"""The card of a unit: its description for other units of its user. It contains the model, the pages' encoding, and
where the pages are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from flexkv.errors import ContractError
from flexkv.storage.base import DiskGroup

PROTOCOL = 2
"""The version of the formats of cards, boards and pools. A unit does not share pages with units of another version."""

MOST_CARD_BYTES = 128 << 10
"""The maximum length of a card, in bytes. It is limited so that a card fits into one packet of a Unix socket."""

MOST_NUMBER = 1 << 62
"""The largest number that a card may contain; native code stores numbers as int64."""

MOST_GROUPS = 64
"""The maximum number of a unit's KV groups."""

MOST_TOKENS = (1 << 31) - 1
"""The maximum number of tokens in a block, and the maximum `reach` (length of a window or chunk). Native code stores
both numbers as uint32.
"""

SHOWN_DIGITS = 8
"""The number of digits of a unit's id that are shown to users."""


@dataclass(frozen=True, slots=True)
class SharedHost:
    """The location of the slots of a unit's host pool. The file descriptors of the pool and of its board are sent with
    the card.

    Attributes:
        board_bytes: size of the pool's board, in bytes.
        file_bytes: size of the pool's file, in bytes.
        slots_offset: offset of slot 0 in the file, in bytes.
        slots_per_extent: number of slots in each extent of the pool.
        extent_stride: bytes from the start of one extent to the next.
        digests: whether slots contain run digests (`host.verify`).
    """

    board_bytes: int
    file_bytes: int
    slots_offset: int
    slot_bytes: int
    slots_per_extent: int
    extent_stride: int
    digests: bool


@dataclass(frozen=True, slots=True)
class SharedDisk:
    """The paths of a unit's folders, in the order in which its places (slots on disk) are striped over them. The file
    descriptor of the folders' board is sent with the card.
    """

    board_bytes: int
    folders: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GroupCard:
    """The encoding of one KV group's pages; see `DiskGroup`.

    Attributes:
        signature: the group's signature in hex.
        runs: for each rank, one triple per run: the run's offset in the stripe, its length in bytes, and its layer.
    """

    format_id: str
    dtype: str
    block_tokens: int
    rule: str
    reach: int
    signature: str
    stripe_bytes: tuple[int, ...]
    runs: tuple[tuple[tuple[int, int, int], ...], ...] = field(repr=False)

    @classmethod
    def of(cls, group: DiskGroup) -> GroupCard:
        return cls(
            group.format_id,
            group.dtype,
            group.block_tokens,
            group.rule,
            group.reach,
            group.signature.hex(),
            group.stripe_bytes,
            tuple(tuple(tuple(run) for run in runs.tolist()) for runs in group.runs),
        )


@dataclass(frozen=True, slots=True)
class UnitCard:
    """A unit's description of itself, which it sends to its peers.

    Attributes:
        unit: the unit's random id in hex, drawn when the unit began to share pages.
        fingerprint: the model's fingerprint, 64 hex digits. Units share pages only if their fingerprints are equal.
        weights: digest of the whole content of the weights, 64 hex digits; empty if the fingerprint covers it.
        groups: the unit's KV groups. Boards identify a group by its index in this tuple.
        host: where the host pool lies; None if host memory is not shared.
        disk: where the folders lie; None if folders are not shared.
    """

    unit: str
    pid: int
    model: str
    fingerprint: str
    weights: str
    groups: tuple[GroupCard, ...]
    host: SharedHost | None = None
    disk: SharedDisk | None = None

    @property
    def disk_groups(self) -> list[DiskGroup]:
        """The unit's KV groups as `DiskGroup` records. The pages of all groups lie in the slots and slabs of the first
        group.
        """
        return [
            DiskGroup(
                format_id=group.format_id,
                stripe_bytes=group.stripe_bytes,
                runs=tuple(np.array(runs, np.int64).reshape(-1, 3) for runs in group.runs),
                block_tokens=group.block_tokens,
                dtype=group.dtype,
                host_digests=self.host is not None and self.host.digests,
                rule=group.rule,
                reach=group.reach,
                signature=bytes.fromhex(group.signature),
                shares=0 if number else None,
            )
            for number, group in enumerate(self.groups)
        ]

    def short(self) -> dict[str, Any]:
        """Returns the content of the unit's file in the runtime folder. Another unit needs no more to decide whether to
        ask this unit for its card.
        """
        return {
            "protocol": PROTOCOL,
            "unit": self.unit,
            "pid": self.pid,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "weights": self.weights,
            "shares": [name for name, shared in (("host", self.host), ("disk", self.disk)) if shared],
        }

    def encode(self) -> bytes:
        """Returns the card as JSON.

        Raises:
            ContractError: the card is too long.
        """
        text = json.dumps({"protocol": PROTOCOL, **asdict(self)}, separators=(",", ":")).encode()
        if len(text) > MOST_CARD_BYTES:
            raise ContractError(f"a unit's card of {len(text)} bytes; allowed are {MOST_CARD_BYTES}")
        return text


def name_of(facts: Mapping[str, Any]) -> str:
    """Returns a unit's name for users: the id of its process and some digits of the unit's id. The process id is not
    enough, because processes in two containers may have the same one.

    Args:
        facts: the unit's facts, as `UnitCard.short` returns them. Some may be missing.
    """
    return f"{facts.get('pid')} ({str(facts.get('unit'))[:SHOWN_DIGITS]})"


def decode_card(text: bytes) -> UnitCard:
    """Returns the card in JSON text that another unit sent.

    Raises:
        ContractError: the bytes are not a card, or the card has another version; the message says what is wrong.
    """
    try:
        told = json.loads(text)
        if told.pop("protocol") != PROTOCOL:
            raise ContractError(f"a unit's card of another version than {PROTOCOL}")
        host, disk = told.pop("host"), told.pop("disk")
        groups = told.pop("groups")
        if not 0 < len(groups) <= MOST_GROUPS:
            raise ContractError(f"a unit's card of {len(groups)} KV groups; allowed are 1 to {MOST_GROUPS}")
        card = UnitCard(
            **told,
            groups=tuple(_group(group) for group in groups),
            host=None if host is None else SharedHost(**host),
            disk=None if disk is None else SharedDisk(disk["board_bytes"], tuple(disk["folders"])),
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ContractError(f"what a unit sent is no card: {type(error).__name__}: {error}") from error
    _check(card)
    return card


def _group(told: dict[str, Any]) -> GroupCard:
    told["runs"] = tuple(tuple(tuple(run) for run in rank) for rank in told["runs"])
    told["stripe_bytes"] = tuple(told["stripe_bytes"])
    bytes.fromhex(told["signature"])
    return GroupCard(**told)


def _check(card: UnitCard) -> None:
    """Checks the types and ranges of a card's values.

    Raises:
        ContractError: a value has the wrong type for its field, or is out of range; the message names the field.
    """
    texts = {name: getattr(card, name) for name in ("unit", "model", "fingerprint", "weights")}
    numbers: dict[str, object] = {"pid": card.pid}
    for number, group in enumerate(card.groups):
        at = f"groups[{number}]"
        texts |= {
            f"{at}.{name}": getattr(group, name) for name in ("format_id", "dtype", "rule", "signature")
        }
        numbers |= {f"{at}.stripe_bytes[{rank}]": size for rank, size in enumerate(group.stripe_bytes)}
    if card.disk is not None:
        texts |= {f"disk.folders[{at}]": folder for at, folder in enumerate(card.disk.folders)}
    for name, text in texts.items():
        if not isinstance(text, str) or "\0" in text:
            raise ContractError(f"a unit's card: {name} is {text!r}, expected a text")
    for name in ("unit", "model"):
        if not texts[name].isprintable():  # users see these texts in logs and tables
            raise ContractError(f"a unit's card: {name} is {texts[name]!r}, expected a printable text")
    if card.host is not None:
        numbers |= {f"host.{name}": value for name, value in asdict(card.host).items() if name != "digests"}
        if not isinstance(card.host.digests, bool):
            raise ContractError(
                f"a unit's card: host.digests is {card.host.digests!r}, expected true or false"
            )
    if card.disk is not None:
        numbers["disk.board_bytes"] = card.disk.board_bytes
    for name, value in numbers.items():
        if not _is_number(value):
            raise ContractError(f"a unit's card: {name} is {value!r}, expected 0 to {MOST_NUMBER}")
    for number, group in enumerate(card.groups):
        _check_group(group, f"groups[{number}]")


def _check_group(group: GroupCard, at: str) -> None:
    for name, tokens in (("block_tokens", group.block_tokens), ("reach", group.reach)):
        if not _is_number(tokens) or tokens > MOST_TOKENS:
            raise ContractError(f"a unit's card: {at}.{name} is {tokens!r}, expected 0 to {MOST_TOKENS}")
    if len(group.runs) != len(group.stripe_bytes):
        raise ContractError(
            f"a unit's card: {at}.runs of {len(group.runs)} ranks, stripe_bytes of {len(group.stripe_bytes)}"
        )
    for rank, runs in enumerate(group.runs):
        if bad := next((run for run in runs if len(run) != 3 or not all(map(_is_number, run))), None):
            raise ContractError(
                f"a unit's card: {at}.runs[{rank}] has {bad!r}, expected offset, bytes and layer"
            )


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value <= MOST_NUMBER
