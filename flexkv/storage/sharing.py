"""Says which slabs each KV group of a unit uses: its own, or those of an earlier group."""

from __future__ import annotations

from collections.abc import Sequence

from flexkv import c_ext
from flexkv.errors import ConfigError, GeometryError
from flexkv.storage.base import DiskGroup

MOST_SIGNATURE_BYTES = 4096
"""The longest allowed signature of a group. Signatures list layer names and shapes, or are a digest of these, so they
are shorter.
"""


def slab_numbers(groups: Sequence[DiskGroup]) -> list[int]:
    """Returns for each group the number of its slab, which is the number of the first group that uses the slab.

    Raises:
        GeometryError: a group shares the slabs of a group that does not come before it, or its signature is too long.
        ConfigError: a group's rule is unknown, or does not allow the group's reach.
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
    """Whether there is only one group, with the rule "full" and without a signature. Version 1 of a slab's header can
    express nothing else.
    """
    return len(groups) == 1 and groups[0].rule == "full" and not groups[0].signature


def groups_of_slab(groups: Sequence[DiskGroup], slab: int) -> dict[int, DiskGroup]:
    """The groups that use the slab with number `slab`, by their numbers."""
    return {n: groups[n] for n, number in enumerate(slab_numbers(groups)) if number == slab}
