"""Which slabs each KV group of a unit uses: its own, or those of an earlier group."""

from __future__ import annotations

from collections.abc import Sequence

from flexkv import c_ext
from flexkv.errors import ConfigError, GeometryError
from flexkv.storage.base import DiskGroup

MOST_SIGNATURE_BYTES = 4096
"""The longest signature of a group. Signatures list layer names and shapes, or are a digest of these, so all are
shorter."""


def slab_numbers(groups: Sequence[DiskGroup]) -> list[int]:
    """For each group the number of its slabs: that of the first group that uses them.

    Raises:
        GeometryError: a group shares with one that is not before it, or its signature is too long.
        ConfigError: the rule is unknown, or does not allow this reach.
    """
    numbers: list[int] = []
    for number, group in enumerate(groups):
        try:
            c_ext.GroupRule(group.rule, group.block_tokens, group.reach)
        except ConfigError as error:
            raise ConfigError(f"group {number}: {error}") from error
        if len(group.signature) > MOST_SIGNATURE_BYTES:
            raise GeometryError(
                f"group {number}: a signature of {len(group.signature)} bytes; allowed are {MOST_SIGNATURE_BYTES}"
            )
        if group.shares is None:
            numbers.append(number)
        elif 0 <= group.shares < number:
            numbers.append(numbers[group.shares])
        else:
            raise GeometryError(
                f"group {number} shares the slabs of group {group.shares}; allowed are those before it, [0, {number})"
            )
    return numbers


def is_plain(groups: Sequence[DiskGroup]) -> bool:
    """Whether there is a single group, with the full rule and without a signature, which is all that version 1 of a
    slab's header can express.
    """
    return len(groups) == 1 and groups[0].rule == "full" and not groups[0].signature


def groups_of_slab(groups: Sequence[DiskGroup], slab: int) -> dict[int, DiskGroup]:
    """The groups that use these slabs, by their numbers."""
    return {n: groups[n] for n, number in enumerate(slab_numbers(groups)) if number == slab}
